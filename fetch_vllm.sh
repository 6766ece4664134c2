#!/usr/bin/env bash
# Fetches the source release of a vLLM version, tests included:
#   fetch_vllm.sh VERSION FOLDER
# What is fetched has the hash in configs/releases.toml. None of it runs.
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
# pip asks a source release for its metadata even when it only fetches it. vLLM's own
# answer takes torch and seconds, so a backend that knows no more answers.
mkdir -p "$scratch/backend/setuptools"
touch "$scratch/backend/setuptools/__init__.py"
cat >"$scratch/backend/setuptools/build_meta.py" <<END
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, settings=None):
    info = Path(folder, "vllm-$version.dist-info")
    info.mkdir()
    text = "Metadata-Version: 2.1\\nName: vllm\\nVersion: $version\\n"
    info.joinpath("METADATA").write_text(text)
    return info.name
END
PYTHONPATH=$scratch/backend .venv/bin/python -m pip download -q --no-deps \
    --no-binary :all: --no-build-isolation --dest "$scratch" \
    --require-hashes -r "$scratch/requirements.txt"
mkdir "$scratch/source"
tar -xzf "$scratch"/vllm-*.tar.gz -C "$scratch/source" --strip-components=1
mkdir -p "$(dirname "$folder")"
mv "$scratch/source" "$folder"
