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
tools="pytest pytest-asyncio pytest-timeout"
# What our decoding needs besides, for scripts/bench/vision.py; its numpy is there already.
decoding="simplejpeg"
if [ "$(cat "$runner/ready" 2>/dev/null)" != "$tools $decoding" ]; then
    pip=("$python" -m pip install --quiet --disable-pip-version-check --upgrade --target "$runner")
    # shellcheck disable=SC2086  # words
    "${pip[@]}" $tools
    "${pip[@]}" --no-deps "$decoding"
    echo "$tools $decoding" >"$runner/ready"
fi
# Its numba is another one: the kernels it compiles are kept apart.
cd "$root"
PYTHONPATH="$root:$runner" NUMBA_CACHE_DIR="$home/numba" OMP_NUM_THREADS=1 \
    "$python" -m pytest -p no:cacheprovider --noconftest -m reference tests/vision/test_reference.py "$@"
