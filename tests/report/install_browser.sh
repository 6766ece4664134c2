#!/usr/bin/env bash
# Installs Chromium for the tests of the reports' pages, where that is possible from here.
# Elsewhere those tests are skipped, and say why.
set -euo pipefail

as_root() { if [[ $EUID == 0 ]]; then "$@"; else sudo -n "$@"; fi; }

install() {
    type -P apt-get >/dev/null && as_root true 2>/dev/null || return
    echo "browser: installing chromium"
    as_root apt-get update -qq &&
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            --no-install-recommends chromium >/dev/null
}

install || echo "browser: Chromium is missing and could not be installed from here; the" \
    "tests of the reports' pages are skipped" >&2
