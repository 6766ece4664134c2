#!/usr/bin/env bash
# The cases of check.sh, in namespaces of their own: cases.sh REPOSITORY WORK MIRROR CASE...
set -euo pipefail
shopt -s inherit_errexit

repository=$1 work=$2 mirror=$3
shift 3
root=$work/root
# Checkout and package cache lie in one mount, so that uv can link from one to the other.
home=$work/home
mkdir -p "$home/uv-cache"

# The host's way to the package registries: variables and files, whatever they say.
network_variables() {
    env -0 | grep -zE '^(PIP_|UV_|SSL_CERT_|REQUESTS_CA_BUNDLE=|CURL_CA_BUNDLE=|[A-Za-z]+_(proxy|PROXY)=)'
}
network_files=(/etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt
    /usr/local/share/ca-certificates/*.crt /etc/pip.conf /etc/uv/uv.toml)
while IFS= read -rd '' variable; do
    [[ -f ${variable#*=} ]] && network_files+=("${variable#*=}")
done < <(network_variables)

apt_options() {
    apt-config dump | grep -E '^Acquire::(https?|ftp|Retries|Check-|ForceIPv)' || true
}

make_release() { # RELEASE: a tar of its minimal root, once
    [[ -f $work/$1.tar ]] && return
    apt_options >"$work/apt.conf"
    mmdebstrap --quiet --variant=minbase --include=sudo,make,git \
        --aptopt="$work/apt.conf" "$1" "$work/$1.tar" "$mirror"
}

make_root() { # RELEASE
    make_release "$1"
    mkdir "$root"
    tar -xf "$work/$1.tar" -C "$root"
    local file
    for file in "${network_files[@]}"; do
        [[ -f $file ]] && install -D -m 644 "$(realpath "$file")" "$root$file"
    done
    mount -t proc proc "$root/proc"
    mount --bind -o ro /sys "$root/sys"
    mount --bind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/dev/shm"
    mount --bind "$home" "$root/home"
}

make_user() { # USER
    rm -rf "$home/me" "$home/my checkout"
    mkdir -p "$home/me"
    local configuration
    for configuration in .config/pip .config/uv .pip; do
        [[ -d $HOME/$configuration ]] || continue
        mkdir -p "$home/me/.config"
        cp -r "$HOME/$configuration" "$home/me/$configuration"
    done
    owner=0
    if [[ $1 != root ]]; then
        owner=1000
        echo 'me:x:1000:1000::/home/me:/bin/bash' >>"$root/etc/passwd"
        echo 'me:x:1000:' >>"$root/etc/group"
        echo 'me:*:20000::::::' >>"$root/etc/shadow"
    fi
    [[ $1 != sudo ]] || echo 'me ALL=(ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/me"
    git -c safe.directory="$repository/.git" clone -q --no-hardlinks \
        "$repository" "$home/me/kvtax"
    cp -r "$home/me/kvtax" "$home/my checkout"
    chown -R "$owner:$owner" "$home"
}

inside() { # USER-ID PATH-OF-A-LOGIN COMMAND...: in the root, with nothing else of ours
    local id=$1 path=$2 variables=()
    shift 2
    mapfile -d '' -t variables < <(network_variables)
    chroot --userspec="$id:$id" "$root" /usr/bin/env -i "${variables[@]}" \
        HOME=/home/me PATH="$path" UV_CACHE_DIR=/home/uv-cache "$@"
}

# PATH as Debian gives it to root, and to others: without sbin.
as_root() { inside 0 /usr/sbin:/usr/bin:/sbin:/bin "$@"; }
as_user() {
    if [[ $owner == 0 ]]; then as_root "$@"; else inside "$owner" /usr/bin:/bin:/usr/games "$@"; fi
}

# A path that LD_PRELOAD would split is refused in the first second.
refuses_spaces() {
    local script said began
    for script in setup.sh run_all.sh; do
        began=${EPOCHREALTIME/./}
        said=$(as_user bash "/home/my checkout/$script" 2>&1) && return 1
        ((${EPOCHREALTIME/./} - began < 1000000)) || return 1
        [[ $said == *"move the checkout"* ]] || return 1
    done
}

# Without the rights to install packages, they are named; an administrator installs them.
names_packages() {
    local said command
    said=$(as_user bash /home/me/kvtax/setup.sh 2>&1) && return 1
    echo "$said"
    command=$(sed -n 's/^ *apt-get install //p' <<<"$said")
    [[ -n $command ]] || return 1
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        --no-install-recommends $command >/dev/null 2>&1
}

# The first two commands of README.
PASTE='
set -e
cd /home/me/kvtax
python3 -m venv env
. env/bin/activate
pip install -q .
kvtax demo --out /home/me/demo'
SMOKE='
set -e
cd /home/me/kvtax
bash run_all.sh --profile cpu-smoke --out /home/me/smoke
grep -rhoE "\"ready_s\": [0-9.]+" /home/me/smoke --include trial.json'

run_case() { # RELEASE USER
    make_root "$1"
    make_user "$2"
    echo "== $1/$2: a path with a space is refused"
    refuses_spaces
    if [[ $2 == user ]]; then
        echo "== $1/$2: the missing packages are named, and an administrator installs them"
        names_packages
    fi
    echo "== $1/$2: setup.sh"
    as_user bash /home/me/kvtax/setup.sh
    echo "== $1/$2: it is in place now"
    [[ -z $(as_user bash /home/me/kvtax/setup.sh 2>&1) ]]
    echo "== $1/$2: run_all.sh --check"
    as_user bash /home/me/kvtax/run_all.sh --check
    echo "== $1/$2: README's paste"
    as_user bash -c "$PASTE"
    echo "== $1/$2: real servers, the smoke profile"
    as_user bash -c "$SMOKE"
    if [[ $2 == root ]]; then
        echo "== $1/$2: make test-fast"
        as_user make -C /home/me/kvtax test-fast
    fi
}

drop_root() {
    umount --lazy --recursive "$root"/{proc,sys,dev,home} 2>/dev/null || true
    rm -rf --one-file-system "$root"
}

table="| machine | user | result | s |"$'\n'"|---|---|---|---:|"
failed=0
for case in "$@"; do
    began=$SECONDS
    # Not as a condition: errexit would be off inside.
    set +e
    (set -e; run_case "${case%/*}" "${case#*/}")
    [[ $? == 0 ]] && result=works || { result=FAILS failed=1; }
    set -e
    drop_root
    table+=$'\n'"| Debian ${case%/*} | ${case#*/} | $result | $((SECONDS - began)) |"
done
echo
echo "$table"
exit "$failed"
