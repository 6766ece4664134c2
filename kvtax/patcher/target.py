# SPDX-License-Identifier: Apache-2.0
"""Package tree to be patched: its place, version and patched files."""

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from .below import read_regular
from .blocks import Added, read
from .errors import DamagedError, TargetError

JOURNAL = ".blockpatch-journal"
LOCK = ".blockpatch.lock"
_VERSION_PY = re.compile(
    r"""^(?:__version__|version)\b[^=\n]*=(?:\s*\w+\s*=)*\s*['"]([\w.+!-]+)['"]""",
    re.M | re.A,
)
_METADATA = re.compile(r"^Version:[ \t]*([\w.+!-]+)\s*$", re.M | re.A)


class Tree:
    """One package directory. Raises TargetError for another path.

    A tree that is `only_read` may hold symbolic links to its files.
    """

    def __init__(self, target: Path | str, only_read: bool = False):
        path = Path(target).absolute()
        if not _is_package(path):
            raise TargetError(f"{path} is not a package directory (no __init__.py)")
        self.package = path.name
        self.root = path.resolve()
        self._path = path
        self._only_read = only_read

    @property
    def title(self) -> str:
        """Package and version."""
        return f"{self.package} {self.version or '(version unknown)'}"

    def __repr__(self) -> str:
        return f"Tree({str(self._path)!r})"

    @cached_property
    def version(self) -> str | None:
        """Version in ``_version.py``, else in the metadata beside it, else None."""
        parent = self._path.parent
        infos = parent.glob(f"{self.package.replace('-', '_')}-*.dist-info/METADATA")
        sources = [(self.root / "_version.py", _VERSION_PY)]
        sources += [(path, _METADATA) for path in sorted(infos)]
        sources += [(parent / "PKG-INFO", _METADATA)]
        for path, pattern in sources:
            if path.is_file():
                match = pattern.search(path.read_text(errors="replace"))
                if match:
                    return match[1]
        return None

    def read(self, path: str) -> bytes | None:
        """Read a file of the tree; None if there is none.

        Raises TargetError if a symbolic link is on the way: replacing it would cut the
        link, and writing through it would edit a file that is not the tree's.
        """
        place = self.root
        for part in Path(path).parts:
            place = place / part
            if place.is_symlink() and not self._only_read:
                raise TargetError(
                    f"{place} is a symbolic link; patch the tree that holds the file"
                )
        try:
            return read_regular(place)
        except FileNotFoundError:
            if place.with_suffix(".pyc").is_file():
                raise TargetError(
                    f"{place} is there as bytecode only; install {self.package} with "
                    "its source"
                ) from None
            return None
        except OSError as error:
            raise TargetError(f"{place} cannot be read: {error.strerror}") from None

    def scan(self, text: bytes) -> dict[str, bytes]:
        """Read by path every Python file in the tree that holds ``text``."""
        matches = {}
        try:
            for path in _python_files(self.root, self._only_read):
                with open(path, "rb") as file:
                    content = file.read()
                if text in content:
                    matches[os.path.relpath(path, self.root)] = content
        except OSError as error:
            raise TargetError(
                f"{error.filename} cannot be read: {error.strerror}"
            ) from None
        return matches

    def remove_if_empty(self) -> None:
        """Remove the directory where our files were the last, as after an uninstall."""
        if not any(self.root.iterdir()):
            self.root.rmdir()


def _python_files(folder: Path | str, links: bool) -> Iterator[str]:
    """Yield the paths of Python files below `folder`, with `links` linked ones too."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in ("__pycache__", JOURNAL):
                    yield from _python_files(entry.path, links)
            elif entry.name.endswith(".py") and entry.is_file(follow_symlinks=links):
                yield entry.path


def _is_package(folder: Path) -> bool:
    """Return whether `folder` is a package, or what a removed one left of ours."""
    if (folder / "__init__.py").is_file():
        return True
    paths = list(_python_files(folder, links=False)) if folder.is_dir() else []
    return bool(paths) and all(_is_added(path, folder) for path in paths)


def _is_added(path: str, root: Path) -> bool:
    with open(path, "rb") as file:
        text = file.read()
    try:
        return isinstance(read(text, os.path.relpath(path, root)), Added)
    except DamagedError:
        return True


def find_package(name: str, fallbacks: Iterable[Path | str] = ()) -> Path:
    """Find the directory of the package that this Python would import, without import.

    ``fallbacks`` are directories to look in after that. Raises TargetError.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    matches = (spec and spec.submodule_search_locations) or ()
    places = [Path(location) for location in matches]
    if spec and spec.origin and not any(_is_package(at) for at in places):
        raise TargetError(
            f"package {name!r} is {spec.origin}, without source in a folder of files; "
            "install it so, or name another place with --target"
        )
    for place in [*places, *(Path(folder) / name for folder in fallbacks)]:
        if _is_package(place):
            return place
    raise TargetError(
        f"no package {name!r} in this Python environment; name its place with --target"
    )


def locate(package: str, target: Path | str) -> Tree:
    """Find the tree of ``package`` at ``target``, in it, or in its ``src``."""
    place = Path(target).absolute()
    inside = [place / package, place / "src" / package]
    for path in [place, *inside] if place.name == package else inside:
        if _is_package(path):
            return Tree(path)
    raise TargetError(
        f"no package {package!r} at {place}; --target takes the package directory, "
        "a directory that contains it, or a source tree"
    )
