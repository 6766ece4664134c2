#!/usr/bin/env bash
# Fetches the source release of a vLLM version, tests included:
#   fetch_vllm.sh VERSION FOLDER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
version=$1 folder=$2
[[ -d $folder ]] && exit

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo "fetching the source of vLLM $version"
# pip asks a source release for its metadata even when it only fetches it. vLLM's answers
# only if its build tools are installed and it is told to build for no device.
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version \
    SETUPTOOLS_SCM_PRETEND_VERSION=$version \
    .venv/bin/python -m pip download -q --no-deps --no-binary :all: \
    --no-build-isolation --dest "$scratch" "vllm==$version"
mkdir "$scratch/source"
tar -xzf "$scratch"/vllm-*.tar.gz -C "$scratch/source" --strip-components=1
mkdir -p "$(dirname "$folder")"
mv "$scratch/source" "$folder"
