# SPDX-License-Identifier: Apache-2.0
"""Every patch of vLLM on every release of vLLM that the package registry has.

    python -m tools.patched_releases [--releases VERSION...] [--write]

Each source release is fetched with pip, unless third_party/ has it, and its Python
files are kept until they are checked. A patch passes on a release if it applies, if
each changed file compiles, if a second --apply changes nothing, and if --revert gives
all files back to the byte. Prints a table in Markdown; --write puts it into
patches/README.md. Exits with 1 if a patch changes a tree in another way. None of
the fetched code is run.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvtax import patcher
from kvtax.paths import PATCHES, REPOSITORY
from kvtax.report.markdown import table

PACKAGE = "vllm"
FIRST = (0, 18, 0)
README = PATCHES / "README.md"
BEGIN, END = "<!--releases-->", "<!--/releases-->"
PASSES, NOT_NEEDED = "passes", "not needed"
# pip asks a source release for its metadata also where it only fetches it. vLLM's own
# build takes torch to answer.
BACKEND = """
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, settings=None):
    info = Path(folder, "vllm-{version}.dist-info")
    info.mkdir()
    text = "Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n"
    info.joinpath("METADATA").write_text(text)
    return info.name
"""

# Per patch and release: PASSES, NOT_NEEDED, or why the release is refused.
Outcomes = dict[str, dict[str, str]]


class Damaged(Exception):
    """A tree that a patch left in another state than it promises."""


def numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers, to sort by."""
    return tuple(map(int, version.split(".")))


def published() -> list[str]:
    """List the registry's releases from FIRST on, without pre-releases."""
    listed = _pip("index", "versions", PACKAGE)
    (versions,) = re.findall(r"^Available versions: (.*)$", listed, re.MULTILINE)
    final = [v for v in versions.split(", ") if re.fullmatch(r"\d+\.\d+\.\d+", v)]
    return sorted((v for v in final if numbers(v) >= FIRST), key=numbers)


def _pip(*arguments: str, backend: Path | None = None) -> str:
    environment = {"PYTHONPATH": str(backend)} if backend else {}
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(
        ["env", *(f"{k}={v}" for k, v in environment.items()), *command],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"pip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def fetch(version: str, place: Path) -> Path:
    """Return a private copy of a release's package, Python files only."""
    package = place / PACKAGE
    source = REPOSITORY / "third_party" / f"vllm-{version}" / PACKAGE
    if source.is_dir():
        only_python = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(source, package, ignore=only_python)
        return package
    backend = place / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(BACKEND.format(version=version))
    _pip(
        *["download", "-q", "--no-deps", "--no-binary", ":all:"],
        *["--no-build-isolation", "--dest", str(place), f"{PACKAGE}=={version}"],
        backend=backend.parent,
    )
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        for member in files:
            path = Path(*Path(member.name).parts[1:])
            if (
                member.isfile()
                and path.parts[:1] == (PACKAGE,)
                and path.suffix == ".py"
            ):
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                content = files.extractfile(member)
                assert content is not None
                (place / path).write_bytes(content.read())
    archive.unlink()
    return package


class Package:
    """Package of a release in a folder; a file is read again where it changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Hash of each file by path and what rename or a write changes.
        self._hashes: dict[tuple[Path, int, int, int], str] = {}

    def state(self) -> dict[str, tuple[int, str]]:
        """Return the mode and hash of each file."""
        return {
            str(path.relative_to(self.folder)): (path.stat().st_mode, self._hash(path))
            for path in self.folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    def _hash(self, path: Path) -> str:
        stat = path.stat()
        key = path, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns
        if key not in self._hashes:
            self._hashes[key] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self._hashes[key]

    @property
    def tree(self) -> patcher.Tree:
        """Return what the patcher changes, as it is now."""
        return patcher.Tree(self.folder)


def outcome(patch: patcher.Patch, package: Package, version: str) -> str:
    """Apply a patch twice and revert it. Raises Damaged if a promise is broken."""
    if not patch.is_needed(version):
        return NOT_NEEDED
    before = package.state()
    try:
        patcher.apply(package.tree, [patch])
    except patcher.BlockPatchError as error:
        if package.state() != before:
            raise Damaged(f"{patch.name} was refused on {version} and wrote") from None
        return str(error).splitlines()[0]
    after = package.state()
    for path in (path for path in after if after[path] != before.get(path)):
        code = (package.folder / path).read_bytes()
        compile(code, path, "exec", dont_inherit=True)
    patcher.apply(package.tree, [patch])
    if package.state() != after:
        raise Damaged(f"{patch.name} on {version}: the second --apply changed a file")
    patcher.revert(package.tree, [patch.name])
    if package.state() != before:
        raise Damaged(f"{patch.name} on {version}: --revert left another tree")
    return PASSES


def check(versions: Sequence[str]) -> Outcomes:
    """Check all patches on all releases. Raises Damaged."""
    patches = [
        patch
        for patch in patcher.load_patches(PATCHES).values()
        if patch.package == PACKAGE
    ]
    outcomes: Outcomes = {patch.name: {} for patch in patches}
    for version in versions:
        with tempfile.TemporaryDirectory(prefix="kvtax-releases-") as place:
            package = Package(fetch(version, Path(place)))
            for patch in patches:
                outcomes[patch.name][version] = outcome(patch, package, version)
        refused = [n for n, of in outcomes.items() if of[version] not in KINDS]
        print(f"{version}: refused {refused or 'none'}", file=sys.stderr, flush=True)
    return outcomes


KINDS = (PASSES, NOT_NEEDED)


def ranges(versions: Sequence[str], chosen: Sequence[str]) -> str:
    """Write `chosen` as runs of neighbours among `versions`."""
    runs: list[list[str]] = []
    for index, version in enumerate(versions):
        if version not in chosen:
            continue
        if runs and index and runs[-1][-1] == versions[index - 1]:
            runs[-1].append(version)
        else:
            runs.append([version])
    texts = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(texts) or "none"


def report(versions: Sequence[str], outcomes: Outcomes) -> str:
    """Return the table, and a line for each patch that a release refuses."""
    rows = []
    for name, of in outcomes.items():
        by_kind = [[v for v in versions if of[v] == kind] for kind in KINDS]
        by_kind.append([v for v in versions if of[v] not in KINDS])
        rows.append([f"`{name}`", *(ranges(versions, chosen) for chosen in by_kind)])
    head = ["patch", "comes and goes", "not needed", "refused, tree untouched"]
    return table(head, rows)


def main() -> int:
    """Check the releases of the command line, or all; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--releases", nargs="+", metavar="VERSION")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    versions = arguments.releases or published()
    try:
        outcomes = check(versions)
    except Damaged as error:
        print(error, file=sys.stderr)
        return 1
    text = report(versions, outcomes)
    print(text)
    for name, of in outcomes.items():
        for version in versions:
            if of[version] not in KINDS:
                print(f"{name} {version}: {of[version]}", file=sys.stderr)
    if arguments.write:
        page = README.read_text()
        start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
        README.write_text(f"{page[:start]}\n{text.strip()}\n{page[end:]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
