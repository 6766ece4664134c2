#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows on a copy of llm-d-kv-cache v0.9.0 that each patch's tests fail without it
# and pass with it, and that upstream's own tests pass as before. Needs go and git;
# tests under the race detector too where there is a gcc.
#   bash check.sh        the first time takes minutes: Go compiles 700 packages
set -euo pipefail
patches=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
peek=$patches/../../kvindex/cmd/kvbench/peek.patch
module=github.com/llm-d/llm-d-kv-cache@v0.9.0
package=pkg/kvcache/kvblock
# Another index behind the same interface: minutes, on an emulated server.
elsewhere='^Test(Redis|Valkey)IndexBehavior$'

fail() { printf 'check: %s\n' "$*" >&2; exit 1; }
for tool in go git; do
    [[ -n $(command -v $tool) ]] || fail "$tool is not on the PATH, install it"
done

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
export TMPDIR=$work/tmp GOWORK=off GIT_CEILING_DIRECTORIES=$work

# run COMMAND...: in a process group of its own, which cleanup can end as a whole.
run() {
    local status=0
    set -m
    "$@" >"$work/log" 2>&1 &
    child=$!
    set +m
    wait "$child" || status=$?
    child=
    return $status
}

# build [-race]: compiles the package's tests as the tree now stands.
build() {
    local cgo=0
    [[ ${1:-} != -race ]] || cgo=1
    run env CGO_ENABLED=$cgo go -C "$work/tree" test "$@" -c -o "$work/kvblock.test" "./$package" ||
        fail "the tests of $package do not compile: $(tail -n 20 "$work/log")"
}

# tests REGULAR_EXPRESSION: runs those of the last build.
tests() {
    run env -C "$work/tree/$package" "$work/kvblock.test" -test.v -test.timeout=10m \
        -test.run="$1" -test.skip="$elsewhere"
}

broken=0
row() { printf '%-27s %-42s %s\n' "$@"; }

# expect pass|fail STATE TEST: a row of the table, for one test of the last build.
expect() {
    local got='did not run' verdict=''
    tests "^$3\$" || true
    ! grep -q "^--- PASS: $3 " "$work/log" || got=pass
    ! grep -q "^--- FAIL: $3 " "$work/log" || got=fail
    if [[ $got != "$1" ]]; then
        verdict="  <- should $1"
        broken=1
    fi
    row "$2" "$3" "$got$verdict"
}

# all STATE FILE: runs all tests of the last build; the names of those that pass go to FILE.
all() {
    local verdict=pass
    tests . || { verdict='fail  <- should pass'; broken=1; }
    sed -n 's/^ *--- PASS: \([^ ]*\) .*/\1/p' "$work/log" | sort >"$work/$2"
    row "$1" "all ($(wc -l <"$work/$2") with subtests)" "$verdict"
    [[ $verdict == pass ]] || grep -E '^ *--- FAIL|^panic|DATA RACE' "$work/log" | head -n 20 || true
}

change() { git -C "$work/tree" apply "$@" || fail "$module has changed: a patch does not apply"; }

run go -C "$work" mod download -json "$module" || fail "cannot fetch $module: $(cat "$work/log")"
upstream=$(sed -n 's/^\t"Dir": "\(.*\)",$/\1/p' "$work/log")
cp -r "$upstream" "$work/tree"
chmod -R u+w "$work/tree"

guard=$(echo "$patches"/0001-*.patch)
promote=$(echo "$patches"/0002-*.patch)

row tree test result
build
all 'v0.9.0' before

change --include='*/in_memory_test.go' "$guard"
build
expect fail 'v0.9.0' TestInMemoryIndexAllocationsWithoutTrace
change --exclude='*_test.go' "$guard"
build
expect pass '0001' TestInMemoryIndexAllocationsWithoutTrace

# prefix_lru_internal_test.go tests what only the patch brings: it cannot compile before.
change --include='*/in_memory_test.go' "$promote"
build
expect fail '0001' TestInMemoryIndexEvictsChainFromTail
expect pass '0001' TestInMemoryIndexKeepsPrefixThatIsRead
change "$peek"
build
expect fail '0001, Get made Peek' TestInMemoryIndexKeepsPrefixThatIsRead
change -R "$peek"
change --exclude='*/in_memory_test.go' "$promote"
build
expect pass '0001 and 0002' TestInMemoryIndexEvictsChainFromTail
expect pass '0001 and 0002' TestInMemoryIndexKeepsPrefixThatIsRead
expect pass '0001 and 0002' TestPrefixLRUPromotesWhatIsStillThere
all '0001 and 0002' after
lost=$(comm -23 "$work/before" "$work/after")
[[ -z $lost ]] || fail "passed before the patches and does not now: $lost"
if [[ -n $(command -v gcc) ]]; then
    build -race
    all '0001 and 0002, -race' race
else
    row '0001 and 0002, -race' all 'not run: needs gcc'
fi

change -R "$promote"
change -R "$guard"
diff -r "$upstream" "$work/tree" || fail 'git apply -R does not give v0.9.0 back'
row '0001 and 0002 taken back' '-' 'v0.9.0 to the byte'
exit $broken
