#!/usr/bin/env bash
# Programs that some tests compare with: promtool and prometheus, and a browser. Installed from
# Debian where that is possible at once; without them those tests are skipped and say so.
set -euo pipefail

packages=()
command -v promtool >/dev/null && command -v prometheus >/dev/null || packages+=(prometheus)
command -v chromium >/dev/null || packages+=(chromium fonts-dejavu-core)
[ ${#packages[@]} -gt 0 ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "tools: not installed here: ${packages[*]}" >&2
    exit 0
fi
echo "tools: installing ${packages[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
install() {
    timeout 600 apt-get install --yes --quiet --no-install-recommends "${packages[@]}" >/dev/null
}
install 2>/dev/null || { timeout 120 apt-get update --quiet >/dev/null && install; } ||
    echo "tools: could not be installed: ${packages[*]}" >&2
