#!/usr/bin/env bash
# Makes the checkout runnable: installs system libraries, uv and the locked .venv.
# run_all.sh and the Makefile call it. It does nothing when everything is in place.
#   setup.sh [cpu|gpu]     which lock to install (default cpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

flavour=${1:-cpu}
lock=locks/$flavour.txt
uv_version=0.13.8

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

[[ -f $lock ]] || fail "no such flavour '$flavour' (want cpu or gpu)"
[[ $(uname -sm) == "Linux x86_64" ]] || fail "vLLM's wheels need Linux on x86_64, this is $(uname -sm)"

# Library file -> the Debian/Ubuntu package that has it (newer releases add t64).
declare -A libraries=(
    [libibverbs.so.1]="libibverbs1"
    [libnuma.so.1]="libnuma1"
    [libcurl.so.4]="libcurl4 libcurl4t64"
)
# The CPU worker starts only with tcmalloc preloaded; a GPU machine does not need it.
[[ $flavour == cpu ]] && libraries[libtcmalloc_minimal.so.4]="libtcmalloc-minimal4 libtcmalloc-minimal4t64"

missing_libraries() {
    local library known
    known=$(ldconfig -p)
    for library in "${!libraries[@]}"; do
        [[ $known == *"$library "* ]] || printf '%s\n' "$library"
    done
}

as_root() {
    if [[ $EUID == 0 ]]; then "$@"; else sudo -n "$@"; fi
}

install_packages() {
    command -v apt-get >/dev/null && { [[ $EUID == 0 ]] || sudo -n true 2>/dev/null; } ||
        fail "cannot install packages here; please install these or their equals: $*"
    as_root apt-get update -qq
    local names name
    for names in "$@"; do
        for name in $names; do
            as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
                --no-install-recommends "$name" >/dev/null 2>&1 && continue 2
        done
        fail "could not install any of: $names"
    done
}

install_libraries() {
    local library wanted=()
    for library in $(missing_libraries); do wanted+=("${libraries[$library]}"); done
    [[ ${#wanted[@]} == 0 ]] && return
    echo "setup: installing ${wanted[*]%% *}"
    install_packages "${wanted[@]}"
    library=$(missing_libraries)
    [[ -z $library ]] || fail "still missing after the installation: $library"
}

find_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13; do
        "$candidate" -c 'import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13): sys.exit(1)
print(sys.executable)' 2>/dev/null && return
    done
    fail "no Python 3.11, 3.12 or 3.13 found; please install python3"
}

find_uv() {
    command -v uv && return
    if [[ ! -x .uv/bin/uv ]]; then
        "$python" -c 'import ensurepip' 2>/dev/null || install_packages "python3-venv" >&2
        "$python" -m venv .uv
        .uv/bin/python -m pip install -q "uv==$uv_version"
    fi
    echo "$PWD/.uv/bin/uv"
}

# The bytecode is kept. Without it, each server compiles vLLM and torch again, which
# takes half of its start. An older .venv, without bytecode, gets it here.
install_environment() {
    local stamp=.venv/.installed_lock
    cmp -s <(installed) "$stamp" && return
    echo "setup: installing the locked environment ($lock)"
    rm -f "$stamp"
    [[ -x .venv/bin/python ]] || "$uv" venv -q --python "$python" .venv
    "$uv" pip sync -q --compile-bytecode --require-hashes \
        --python .venv/bin/python "$lock"
    installed >"$stamp"
}

installed() {
    cat "$lock"
    echo "# bytecode compiled"
}

# Two commands started at once must not install into the same .venv.
exec 9>.setup.lock
flock 9
install_libraries
python=$(find_python)
uv=$(find_uv)
install_environment
