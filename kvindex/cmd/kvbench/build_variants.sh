#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds this benchmark against four states of upstream's index, into a folder:
#   kvbench           llm-d-kv-cache as go.mod requires it
#   kvbench-peek      with peek.patch: its pull request #562, for comparison only
#   kvbench-guarded   with patch 0001 of patches/llm-d-kv-cache
#   kvbench-promote   with patches 0001 and 0002
#   bash build_variants.sh FOLDER
# The patched copies of upstream stay in FOLDER/src: Go then finds again what it
# compiled there the last time.
set -euo pipefail

fail() { printf 'build_variants: %s\n' "$*" >&2; exit 1; }
[[ $# == 1 ]] || fail 'want one argument, the folder that the binaries go to'
for tool in go git; do
    [[ -n $(command -v $tool) ]] || fail "$tool is not on the PATH, install it"
done
mkdir -p "$1/src"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"
patches=$PWD/../../../patches/llm-d-kv-cache
module=github.com/llm-d/llm-d-kv-cache

work=$(mktemp -d)
child=
cleanup() {
    trap '' INT TERM HUP
    if [[ -n $child ]]; then
        kill -KILL -- "-$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir "$work/tmp"
export CGO_ENABLED=0 GOWORK=off GOTMPDIR=$work/tmp

# run COMMAND...: in a process group of its own, which cleanup can end as a whole.
run() {
    local status=0
    set -m
    "$@" &
    child=$!
    set +m
    wait "$child" || status=$?
    child=
    return $status
}

# build NAME [OPTION...]
build() {
    local name=$1
    shift
    run go build -buildvcs=false "$@" -o "$out/$name" . || fail "$name does not build"
}

# variant NAME PATCH...: builds against a copy of upstream with the patches.
variant() {
    local name=$1 copy=$out/src/$1 patch
    shift
    rm -rf "$copy"
    cp -r "$upstream" "$copy"
    chmod -R u+w "$copy"
    for patch in "$@"; do
        GIT_CEILING_DIRECTORIES=$out/src git -C "$copy" apply "$patch" || fail "$patch does not apply to $upstream"
    done
    cp go.mod "$work/$name.mod"
    cp go.sum "$work/$name.sum"
    go mod edit -replace="$module=$copy" "$work/$name.mod"
    build "$name" -modfile="$work/$name.mod"
}

run go mod download "$module" || fail "cannot fetch $module"
upstream=$(go list -m -f '{{.Dir}}' "$module")
build kvbench
variant kvbench-peek "$PWD/peek.patch"
variant kvbench-guarded "$patches"/0001-*.patch
variant kvbench-promote "$patches"/0001-*.patch "$patches"/0002-*.patch
