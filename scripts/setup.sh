#!/usr/bin/env bash
# Makes .venv with mmrouter installed from this tree; at once when nothing has changed.
#   scripts/setup.sh       what running it needs
#   scripts/setup.sh dev   what testing it needs as well
# Needs Python 3.11 or newer with pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra="${1:-}"
venv_python=.venv/bin/python

find_python() {
    local name
    for name in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "setup: no Python 3.11 or newer found; set PYTHON to one" >&2
    return 1
}

# What an installation depends on: the declared packages, and the protos its code is made from.
checksum() {
    cat pyproject.toml proto/*.proto scripts/build_wire.py |
        "$venv_python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

if ! "$venv_python" -c '' 2>/dev/null; then
    python="$(find_python)"
    echo "setup: making .venv with $("$python" --version)" >&2
    rm -rf .venv
    # Debian splits ensurepip off; the pip that is there can fill such a .venv too.
    "$python" -m venv .venv >/dev/null 2>&1 || {
        rm -rf .venv
        "$python" -m venv --without-pip .venv
        "$python" -m pip --python "$venv_python" install --quiet pip
    }
fi

wanted="$(checksum)"
generated=(router/wire/common_pb2.py router/wire/vllm_engine_pb2_grpc.py router/wire/router_pb2_grpc.py)
current() {
    local file
    for file in "${generated[@]}"; do
        [ -e "$file" ] || return 1
    done
    # With the tools for testing, what running needs is there as well.
    [ "$(cat ".venv/.installed-dev" 2>/dev/null)" = "$wanted" ] ||
        { [ -z "$extra" ] && [ "$(cat ".venv/.installed-" 2>/dev/null)" = "$wanted" ]; }
}

if ! current; then
    echo "setup: installing mmrouter${extra:+ with [$extra]} into .venv" >&2
    "$venv_python" -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}"
    echo "$wanted" >".venv/.installed-$extra"
fi
