#!/usr/bin/env bash
# Makes the checkout runnable: installs system libraries, uv and the locked .venv.
# run_all.sh and the Makefile call it. It does nothing when everything is in place.
#   setup.sh [cpu|gpu]     which lock to install (default: that of .venv, else cpu)
set -euo pipefail
shopt -s inherit_errexit
cd -P "$(dirname "${BASH_SOURCE[0]}")"

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

[[ $PWD != *[[:space:]:]* ]] ||
    fail "the path '$PWD' has a space or a colon, which end a path in LD_PRELOAD and" \
        "PYTHONPATH: move the checkout to a path without them"

# Which lock is installed, or was begun to be.
stamp=.venv/.installed_lock
installed_flavour() { if grep -qs '^vllm==' "$stamp"; then echo gpu; else echo cpu; fi; }

flavour=${1:-$(installed_flavour)}
lock=locks/$flavour.txt
uv_version=0.13.8
# Of its wheel for Linux on x86_64.
uv_sha256=e18a57b8b352eb7c8feb317b9f6f533c8f0ad9673fd6cf34bbe3cf1a9f6a8984

[[ -f $lock ]] || fail "no such flavour '$flavour' (want cpu or gpu)"
[[ $(uname -sm) == "Linux x86_64" ]] || fail "vLLM's wheels need Linux on x86_64, this is $(uname -sm)"

# Library -> the Debian and Ubuntu package that has it (newer releases add t64, and
# still know the old name).
declare -A libraries=(
    [libibverbs.so.1]=libibverbs1
    [libnuma.so.1]=libnuma1
    [libcurl.so.4]=libcurl4
)
# The CPU worker starts only with tcmalloc preloaded. Mooncake for GPUs links libmlx5.
case $flavour in
    cpu) libraries[libtcmalloc_minimal.so.4]=libtcmalloc-minimal4 ;;
    gpu) libraries[libmlx5.so.1]=ibverbs-providers ;;
esac

# Release -> its package of a Python that vLLM takes, where that is not python3.
declare -A pythons=([jammy]=python3.11)
fetched_python=3.12
no_python="no Python 3.11, 3.12 or 3.13 found"

# The loader itself is asked: it complains about what it cannot load.
can_load() { [[ -z $(LD_PRELOAD=$1 "$(type -P true)" 2>&1) ]]; }

missing_libraries() {
    local library
    for library in "${!libraries[@]}"; do
        can_load "$library" || echo "$library"
    done
}

# Sets `python`: to a path, or to "" if there is none that vLLM takes.
find_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13; do
        python=$("$candidate" -c 'import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13): sys.exit(1)
print(sys.executable)' 2>/dev/null) && return
    done
    python=
}

# Sets `uv`: to a path, where it may still have to be installed.
find_uv() { uv=$(type -P uv) || uv=$PWD/.uv/bin/uv; }

release() { sed -n 's/^VERSION_CODENAME=//p' /etc/os-release 2>/dev/null || true; }

# What getting uv takes. uv itself can fetch a Python, so nothing if it is there.
python_packages() {
    local codename package
    [[ -x $uv ]] && return
    if [[ -z $python ]]; then
        codename=$(release)
        package=${pythons[${codename:-other}]:-python3}
        echo "$package $package-venv"
    elif ! "$python" -c 'import ensurepip' &>/dev/null; then
        "$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'
    fi
}

as_root() { if [[ $EUID == 0 ]]; then "$@"; else sudo -n "$@"; fi; }

install_packages() {
    type -P apt-get >/dev/null && { [[ $EUID == 0 ]] || sudo -n true 2>/dev/null; } ||
        fail "these packages are missing, and cannot be installed from here. With the" \
            "rights to do so (elsewhere than on Debian and Ubuntu, install their equals):" \
            $'\n'"    apt-get install $*"
    echo "setup: as root, apt-get will install: $*"
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        --no-install-recommends "$@" >/dev/null ||
        fail "apt-get could not install $*; see above"
}

install_system() {
    local library libraries_missing packages='' wanted=()
    libraries_missing=$(missing_libraries)
    for library in $libraries_missing; do wanted+=("${libraries[$library]}"); done
    is_installed || packages=$(python_packages)
    wanted+=($packages)
    [[ ${#wanted[@]} == 0 ]] && return
    install_packages "${wanted[@]}"
    libraries_missing=$(missing_libraries)
    [[ -z $libraries_missing ]] ||
        fail "still missing after the installation:" $libraries_missing
    find_python
}

install_uv() {
    [[ -x $uv ]] && return
    [[ -n $python ]] || fail "$no_python. Install one, with its venv module"
    echo "setup: installing uv"
    "$python" -m venv .uv
    .uv/bin/python -m pip install -q --require-hashes \
        -r <(echo "uv==$uv_version --hash=sha256:$uv_sha256")
}

# Of these a server imports little or nothing.
rarely_imported='site-packages/(anthropic|fontTools|mypy|numba|pip|ray|setuptools|transformers/models)/'

# The bytecode is kept. Without it, each server compiles vLLM and torch again, which
# takes half of its start. An older .venv, without bytecode, gets it here.
install_environment() {
    echo "setup: installing the locked environment ($lock)"
    [[ -x .venv/bin/python ]] || make_environment
    cp "$lock" "$stamp"
    "$uv" pip sync -q --require-hashes --python .venv/bin/python "$lock"
    "$uv" pip install -q --no-deps --no-build-isolation --python .venv/bin/python -e . -e fleet
    # A file for another Python cannot be compiled, and does not have to be.
    .venv/bin/python -m compileall -qq -j 0 -x "$rarely_imported" .venv/lib || true
    complete_stamp >"$stamp"
}

make_environment() {
    rm -rf .venv
    UV_PYTHON_INSTALL_DIR=$PWD/.uv/python UV_PYTHON_INSTALL_BIN=0 \
        "$uv" venv -q --python "${python:-$fetched_python}" .venv && return
    [[ -n $python ]] || fail "$no_python, and uv could not fetch one. Install one: on" \
        "Debian 12, Debian 13 and Ubuntu 24.04, apt-get install python3; on" \
        "Ubuntu 22.04, python3.11"
    fail "uv could not make .venv; see above"
}

complete_stamp() {
    cat "$lock"
    echo "# bytecode compiled, kvtax and kvtax-fleet installed from this checkout"
}

is_installed() { [[ -x .venv/bin/python ]] && cmp -s <(complete_stamp) "$stamp"; }

# Two commands started at once must not install into the same .venv.
exec 9>.setup.lock
flock 9
find_python
find_uv
install_system
is_installed && exit
install_uv
install_environment
