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
# A source release is asked for its metadata even when it is only fetched, and vLLM
# answers only with its build tools there and no device to build for.
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version \
    SETUPTOOLS_SCM_PRETEND_VERSION=$version \
    .venv/bin/python -m pip download -q --no-deps --no-binary :all: \
    --no-build-isolation --dest "$scratch" "vllm==$version"
mkdir "$scratch/source"
tar -xzf "$scratch"/vllm-*.tar.gz -C "$scratch/source" --strip-components=1
mkdir -p "$(dirname "$folder")"
mv "$scratch/source" "$folder"
