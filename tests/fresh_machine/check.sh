#!/usr/bin/env bash
# Does a clone of what is committed here work on a machine that has nothing yet? Each case is a minimal root of
# a Debian release, and a user: root, one with sudo, or one without.
#   tests/fresh_machine/check.sh [CASE...]      e.g. bookworm/root (default: all six)
# It needs root, mmdebstrap, 25 GB in $TMPDIR (or /tmp), and a network for apt (from
# $DEBIAN_MIRROR, else this machine's own mirror of Debian) and pip, used as here.
# Roots, mounts and processes are gone when it ends, however it ends; after SIGKILL the
# roots are removed by the next run.
set -euo pipefail
shopt -s inherit_errexit

fail() { printf 'fresh-machine-check: %s\n' "$*" >&2; exit 2; }

[[ $EUID == 0 ]] || fail "run this as root: it mounts and changes roots"

releases=(bookworm trixie)
users=(root sudo user)
# The first source of packages of this machine that is one of Debian.
own_mirror() {
    apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -m 1 -E '/debian/?$' ||
        echo http://deb.debian.org/debian
}
mirror=${DEBIAN_MIRROR:-$(own_mirror)}
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
repository=$(dirname "$(dirname "$here")")
work=${TMPDIR:-/tmp}/kvtax-fresh-machine

for tool in mmdebstrap unshare setpriv flock git; do
    type -P "$tool" >/dev/null || fail "$tool is missing: apt-get install mmdebstrap util-linux git"
done

if [[ $# == 0 ]]; then
    for release in "${releases[@]}"; do set -- "$@" "${users[@]/#/$release/}"; done
fi
for case in "$@"; do
    [[ " ${releases[*]} " == *" ${case%/*} "* && " ${users[*]} " == *" ${case#*/} "* ]] ||
        fail "no case '$case': want RELEASE/USER of: ${releases[*]}; ${users[*]}"
done

exec 9<"${work%/*}"  # A lock that leaves no file.
flock -n 9 || fail "another one is running"
inside=
clean() {
    [[ -z $inside ]] || { kill -KILL "$inside" && wait "$inside" || true; } 2>/dev/null
    # What was killed may still be writing for a moment.
    rm -rf --one-file-system "$work" || { sleep 1; rm -rf --one-file-system "$work"; }
}
rm -rf --one-file-system "$work"
mkdir "$work"
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Mounts and processes of the cases belong to namespaces, which end with this script.
setpriv --pdeathsig KILL \
    unshare --mount --pid --fork --kill-child=KILL --mount-proc \
    bash "$here/cases.sh" "$repository" "$work" "$mirror" "$@" 9>&- &
inside=$!
wait "$inside" && status=0 || status=$?
inside=
exit "$status"
