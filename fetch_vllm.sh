#!/usr/bin/env bash
# Fetches the source release of a vLLM version, tests included:
#   fetch_vllm.sh VERSION FOLDER
# What is fetched has the hash in configs/releases.toml, before any of it runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
version=$1 folder=$2
[[ -d $folder ]] && exit

sha256=$(sed -n '/^version = "'"$version"'"$/,/^$/s/^sdist_sha256 = "\(.*\)"$/\1/p' \
    configs/releases.toml)
[[ -n $sha256 ]] || {
    echo "no sdist_sha256 of vLLM $version in configs/releases.toml: add the release" >&2
    exit 1
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo "vllm==$version --hash=sha256:$sha256" >"$scratch/requirements.txt"
echo "fetching the source of vLLM $version"
# pip asks a source release for its metadata even when it only fetches it. vLLM's answers
# only if its build tools are installed and it is told to build for no device.
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version \
    SETUPTOOLS_SCM_PRETEND_VERSION=$version \
    .venv/bin/python -m pip download -q --no-deps --no-binary :all: \
    --no-build-isolation --dest "$scratch" \
    --require-hashes -r "$scratch/requirements.txt"
mkdir "$scratch/source"
tar -xzf "$scratch"/vllm-*.tar.gz -C "$scratch/source" --strip-components=1
mkdir -p "$(dirname "$folder")"
mv "$scratch/source" "$folder"
