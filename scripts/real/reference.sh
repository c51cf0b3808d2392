#!/usr/bin/env bash
# Compares our tensors live with those of torch and transformers, on random pictures and clips.
#   scripts/real/reference.sh [PYTEST ARGUMENT…]
# Uses the environment that setup.sh makes, which has both, and puts a test runner beside it.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
home="${REAL_VLLM_HOME:-$HOME/.cache/mmrouter-real-vllm}"
"$root/scripts/real/setup.sh" >&2

runner="$home/runner"
python="$home/venv/bin/python"
# With what our decoding needs besides, for scripts/bench/vision.py.
packages=(pytest pytest-asyncio pytest-timeout simplejpeg)
if [ "$(cat "$runner/ready" 2>/dev/null)" != "${packages[*]}" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --upgrade --no-deps \
        --target "$runner" simplejpeg
    "$python" -m pip install --quiet --disable-pip-version-check --upgrade --target "$runner" \
        "${packages[@]:0:3}"
    echo "${packages[*]}" >"$runner/ready"
fi
# Its numba is another one: the kernels it compiles are kept apart.
cd "$root"
PYTHONPATH="$root:$runner" NUMBA_CACHE_DIR="$home/numba" OMP_NUM_THREADS=1 \
    "$python" -m pytest -p no:cacheprovider --noconftest -m reference tests/vision/test_reference.py "$@"
