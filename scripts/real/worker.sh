#!/usr/bin/env bash
# worker.sh [HOST:PORT] [FLAG OF mmrouter vllm…] [-- FLAG OF VLLM…]: the tiny model on a
# real vLLM, on the CPU, in the foreground. Serves after about half a minute; 2.8 GB.
# The environment comes from setup.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=${REAL_VLLM_HOME:-$HOME/.cache/mmrouter-real-vllm}
[ -f "$home/ready" ] || { echo "no $home/ready: run $here/setup.sh first" >&2; exit 1; }

listen=127.0.0.1:50151
case "${1:-}" in *:*) listen=$1; shift ;; esac
ours=() theirs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do ours+=("$1"); shift; done
[ $# -eq 0 ] || { shift; theirs=("$@"); }

# Nothing is fetched, nothing reported, and all that vLLM writes stays in one place.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_HOST_IP=127.0.0.1
export HF_HOME=$home/hf VLLM_CACHE_ROOT=$home/cache VLLM_CONFIG_ROOT=$home/config
export XDG_CACHE_HOME=$home/cache TORCHINDUCTOR_CACHE_DIR=$home/cache/inductor
# One thread and no pinning: several workers and the tests share this machine.
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec nice -n 10 "${PYTHON:-$here/../../.venv/bin/python}" -m router vllm "$home/tiny-qwen3vl" \
    --python "$home/venv/bin/python" --listen "$listen" --start-timeout 5m --stop-timeout 30s \
    ${ours[@]+"${ours[@]}"} -- \
    --enforce-eager --seed 0 --max-model-len 2048 --max-num-seqs 8 \
    --max-num-batched-tokens 2048 --limit-mm-per-prompt '{"image": 4, "video": 1}' \
    ${theirs[@]+"${theirs[@]}"}
