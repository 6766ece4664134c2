# SPDX-License-Identifier: Apache-2.0
"""The series' code is that of this repository's patches, less the block markers.

    python -m tools.upstream.series [VERSION]...

makes the series anew: each commit keeps its message and its tests, and gets the code
that its patch makes of the release now.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from kvtax import patcher
from kvtax.patcher.blocks import Added, read, render
from kvtax.paths import PATCHES
from tools.upstream.release import (
    PART,
    Release,
    Repository,
    UpstreamError,
    load_releases,
)


def patched_code(release: Release, names: list[str], place: Path) -> dict[str, bytes]:
    """Apply the named patches to a release: content by path from its root.

    `place` is an empty folder to work in. Raises patcher.BlockPatchError if one of
    them does not fit.
    """
    patches = patcher.load_patches(PATCHES)
    wanted = [patches[name] for name in names]
    source, tree = release.source / "vllm", place / "vllm"
    touched = {spec.file for patch in wanted for spec in patch.blocks}
    for path in touched | {"__init__.py", "_version.py"}:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, tree / path)
    patcher.apply(patcher.Tree(tree), wanted)
    added = {path for patch in wanted for path in patch.files}
    # A release may need none of a file's blocks.
    changed = added | {
        path
        for path in touched
        if (tree / path).read_bytes() != (source / path).read_bytes()
    }
    return {
        f"vllm/{path}": tidied(without_markers(tree, path), release)
        for path in sorted(changed)
    }


def without_markers(tree: Path, path: str) -> bytes:
    """Read a file as if the blocks in it had always been part of it."""
    file = read((tree / path).read_bytes(), path)
    if isinstance(file, Added):
        return file.content
    return render(file.lines, [replace(b, text=b.code) for b in file.blocks])


def tidied(code: bytes, release: Release) -> bytes:
    """Format code as the release's own pre-commit does.

    Blocks come without blank lines around them, and releases differ in their rules.
    """
    ruff = [sys.executable, "-m", "ruff"]
    config = ["-q", "--config", str(release.source / "pyproject.toml")]
    name = ["--stdin-filename", str(release.source / "vllm" / "code.py"), "-"]
    for command in (["check", "--fix-only"], ["format"]):
        code = subprocess.run(
            [*ruff, *command, *config, *name],
            input=code,
            capture_output=True,
            check=True,
        ).stdout
    return code


def rebuild(release: Release, scratch: Path) -> bool:
    """Write a release's series anew; return whether that changed it.

    Raises UpstreamError if the series has not one commit for each patch.
    """
    repository = Repository(release, scratch / "vllm", PART)
    repository.apply(release.series)
    commits = repository.git("rev-list", "--reverse", "base..series").split()
    if len(commits) != len(release.sources):
        raise UpstreamError(
            f"{release.version}: {len(commits)} commits for {len(release.sources)} "
            "patches; releases.toml and the series must agree"
        )
    repository.git("checkout", "-q", "-b", "rebuilt", "base")
    for number, commit in enumerate(commits):
        repository.git("checkout", "-q", commit, "--", "tests")
        names = list(release.sources[: number + 1])
        code = patched_code(release, names, scratch / str(number))
        for path, content in code.items():
            (repository.root / path).write_bytes(content)
        repository.git("add", "--all")
        repository.git("commit", "-q", "-C", commit)
    before = release.series.read_text()
    # Without what differs from run to run.
    options = ["--stdout", "--zero-commit", "--no-signature", "--no-numbered"]
    release.series.write_text(repository.git("format-patch", *options, "base..rebuilt"))
    return release.series.read_text() != before


def main() -> int:
    """Make the series of the versions named anew, or all; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    try:
        releases = load_releases(parser.parse_args().versions)
        for version, release in releases.items():
            with tempfile.TemporaryDirectory(prefix="kvtax-upstream-") as scratch:
                changed = rebuild(release, Path(scratch))
            print(f"vLLM {version}:", "changed" if changed else "nothing to change")
    except UpstreamError as error:
        print(f"upstream series: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
