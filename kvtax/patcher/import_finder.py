# SPDX-License-Identifier: Apache-2.0
"""Import patched modules in place of a package's own, whose files stay as they are.

A copy of this file is the `sitecustomize.py` of an overlay, a folder that
kvtax.patcher.at_import writes; with the overlay on PYTHONPATH every Python process runs
it at its start. Where another sitecustomize comes first and runs no other, the copies
in the overlay's STAND_INS, which is on PYTHONPATH as well, are found in place of the
packages, and each installs the finder and then imports the package itself.

It needs only the standard library, Python >= 3.10, and nothing of kvtax. Most of those
processes import nothing patched, so modules that take milliseconds to import (json,
collections, importlib.util) are imported where they are needed.

A patched module has the name, `__file__` and package data of the module that it
replaces. Its code comes from the overlay's source file, which tracebacks and `inspect`
show.
"""

from __future__ import annotations

import _thread
import marshal
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType

# A line for each module: its name, the SHA-256 of the file that it replaces, or ADDED,
# size and time of that file, and the patched source, a path from the overlay's folder.
MODULES = "patched_modules.txt"
ADDED = "-"
# A folder for an empty file for each patched module that a process has imported, and
# the file that names the abstract socket to which the process reports it.
IMPORTED = "imported"
REPORTS = "reports"
# Seconds that a report may take.
REPORT_S = 1.0
# A folder with a package for each patched one, of its name.
STAND_INS = "stand-ins"


class RefusedError(RuntimeError):
    """A file differs from the one that was planned for.

    No ImportError: packages go on without a module that raises one.
    """


class PatchedLoader(SourceFileLoader):
    """Loads the source file `patched` of the overlay in `folder` as the module whose
    own file is `path`."""

    def __init__(self, name: str, path: str, folder: str, patched: str) -> None:
        super().__init__(name, path)
        self.folder = folder
        self.patched = patched
        tag = f"{sys.implementation.cache_tag}-{sys.flags.optimize}"
        self.cached = f"{patched}.{tag}.code"

    def get_code(self, fullname: str) -> CodeType:
        """Read the code from the overlay's cache, or compile the source into it.

        The cache is written under `python -B` too, as the overlay belongs to one run.
        """
        try:
            with open(self.cached, "rb") as file:
                code: CodeType = marshal.loads(file.read())
            return code
        except (OSError, ValueError, EOFError, TypeError):
            code = self.source_to_code(self.get_data(self.patched), self.patched)
        try:
            part = f"{self.cached}.{os.getpid()}"
            # Whatever the umask, no other user may write what is run.
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(handle, "wb") as file:
                file.write(marshal.dumps(code))
            os.replace(part, self.cached)
        except OSError:  # a full disk, or another user's overlay
            pass
        return code

    def get_source(self, fullname: str) -> str:
        """Return the patched text."""
        import importlib.util

        return importlib.util.decode_source(self.get_data(self.patched))

    def exec_module(self, module: ModuleType) -> None:
        """Run the patched code; let `inspect` find its text under the module's path."""
        import linecache

        text = self.get_source(module.__name__)
        lines = text.splitlines(keepends=True)
        # Without a modification time the entry is never compared with the file.
        linecache.cache[self.path] = (len(text), None, lines, self.path)
        _report(self.folder, module.__name__)
        super().exec_module(module)


def _report(folder: str, name: str) -> None:
    """Report an imported module to whoever started this run, if that is there."""
    try:
        with open(os.path.join(folder, REPORTS), encoding="ascii") as file:
            place = file.read()
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
            reports.settimeout(REPORT_S)
            reports.sendto(name.encode(), f"\0{place}")
    except OSError:
        pass


class PatchedFinder:
    """Finds the modules of the overlay in `folder`, before the finder of files."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        # Other finders may ask for a spec in turn, which comes back here.
        self._busy: set[tuple[str, int]] = set()
        with open(os.path.join(folder, MODULES), encoding="utf-8") as file:
            lines = (line.split() for line in file)
            self._modules = {name: tuple(rest) for name, *rest in lines}
        self._packages = {name.partition(".")[0] for name in self._modules}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find a patched module. Raises RefusedError if its own file is another now."""
        if fullname not in self._modules and fullname not in self._packages:
            return None
        call = fullname, _thread.get_ident()
        if call in self._busy:
            return None
        self._busy.add(call)
        try:
            own = self._own_spec(fullname, path, target)
            return (
                self._patched_spec(fullname, own) if fullname in self._modules else own
            )
        finally:
            self._busy.discard(call)

    def _patched_spec(self, fullname: str, own: ModuleSpec | None) -> ModuleSpec | None:
        import importlib.util

        sha256, identity, source = self._modules[fullname]
        patched = os.path.join(self.folder, source)
        folder = getattr(own and own.loader, "folder", self.folder)
        if own is not None and folder != self.folder:
            raise RefusedError(
                f"{own.origin} is patched by another kvtax run around this one; name "
                "all patches in one of the two"
            )
        if sha256 == ADDED:
            # A module of an added package is found in the overlay itself.
            if own is not None and own.origin != patched:
                raise RefusedError(
                    f"{own.origin}: a patch adds this module, and the package has one "
                    "of its own now; start again with kvtax run"
                )
            loader = PatchedLoader(fullname, patched, self.folder, patched)
            return importlib.util.spec_from_file_location(
                fullname, patched, loader=loader
            )
        if own is None or own.origin is None:
            return None
        _require(own.origin, sha256, identity)
        loader = PatchedLoader(fullname, own.origin, self.folder, patched)
        spec = importlib.util.spec_from_file_location(
            fullname,
            own.origin,
            loader=loader,
            submodule_search_locations=own.submodule_search_locations,
        )
        if spec is not None:
            spec.cached = loader.cached
        return spec

    def _own_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        if path is None:
            path = _without_stand_ins(self.folder)
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


def identity_of(status: os.stat_result) -> str:
    """Return size and time of a file, which change with it."""
    return f"{status.st_size}-{status.st_mtime_ns}"


def _require(file: str, sha256: str, identity: str) -> None:
    """Raise RefusedError unless `file` is that one, or has that hash."""
    if identity_of(os.stat(file)) == identity:
        return
    import hashlib

    with open(file, "rb") as opened:
        if hashlib.sha256(opened.read()).hexdigest() != sha256:
            raise RefusedError(
                f"{file} is not the file that the patches were planned for: the "
                "package was changed since, or this Python has another one; start "
                "again with kvtax run"
            )


def _without_stand_ins(folder: str) -> list[str]:
    return [place for place in sys.path if place != os.path.join(folder, STAND_INS)]


def _require_safe(folder: str) -> None:
    """Raise RefusedError for an overlay in which another user can write."""
    for place in (folder, os.path.join(folder, MODULES), os.path.abspath(__file__)):
        status = os.stat(place)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise RefusedError(
                f"{place} belongs to user {status.st_uid} or can be written by others "
                f"(mode {status.st_mode & 0o7777:o}); start again with kvtax run"
            )


def install(folder: str) -> None:
    """Import the patched modules of the overlay in `folder` from now on.

    Finders that hand on to others, as those of import hooks do, stay in front. Raises
    RefusedError.
    """
    _require_safe(folder)
    first = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
    sys.meta_path.insert(first, PatchedFinder(folder))


def _import_own(name: str, folder: str) -> None:
    """Import the package that this module stands in for."""
    if any(getattr(finder, "folder", "") == folder for finder in sys.meta_path):
        sys.path[:] = _without_stand_ins(folder)
    else:
        install(folder)
    del sys.modules[name]
    __import__(name)


def _run_hidden_sitecustomize(folder: str) -> None:
    """Run the sitecustomize that the one in `folder` hides from this Python."""
    behind = sys.path[sys.path.index(folder) + 1 :]
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        # importlib.util would import more than all the rest of this.
        module = type(sys)("sitecustomize")
        module.__spec__, module.__file__ = spec, spec.origin
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_folder = os.path.dirname(os.path.abspath(__file__))
_stand_ins = os.path.dirname(_folder)
if __name__ == "sitecustomize":
    install(_folder)
    _run_hidden_sitecustomize(_folder)
elif os.path.basename(_stand_ins) == STAND_INS:
    _import_own(__name__, os.path.dirname(_stand_ins))
