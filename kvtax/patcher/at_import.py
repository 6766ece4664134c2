# SPDX-License-Identifier: Apache-2.0
"""Apply patches to modules as they are imported; the package's files stay untouched.

    plans = plan_imports(patches, parameters, tree_of)
    write_overlay(folder, plans)
    env["PYTHONPATH"] = python_path(folder, behind=env.get("PYTHONPATH", ""))

The plan is that of `apply`: the same anchors, the same refusals, the same text. It is
made once and written to an overlay, from which every process below takes its modules
(import_finder.py): interpreters of another version or environment, too.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from . import engine, import_finder
from .patch import Patch
from .plan import Change, Plan
from .target import Tree

# Not importable, so that the overlay has no module but sitecustomize.
SOURCES = "patched-sources"


class ImportPlan(NamedTuple):
    """Patches of one package, and what they change in it."""

    tree: Tree
    patches: list[Patch]
    plan: Plan


def plan_imports(
    patches: Sequence[Patch],
    parameters: Mapping[str, Any],
    tree_of: Callable[[str], Tree],
) -> list[ImportPlan]:
    """Plan to apply `patches`, each to the tree of its package. Writes nothing.

    Raises BlockPatchError as `apply` does.
    """
    return [
        ImportPlan(tree, mine, engine.check(tree, mine, given))
        for tree, mine, given in engine.split_by_package(patches, parameters, tree_of)
    ]


def write_overlay(folder: Path, plans: Iterable[ImportPlan]) -> None:
    """Write the planned modules and their finder into `folder`.

    Whatever the umask, other users may read all of it, and write nothing.
    """
    umask = os.umask(0o022)
    try:
        _write_overlay(folder, plans)
    finally:
        os.umask(umask)


def _write_overlay(folder: Path, plans: Iterable[ImportPlan]) -> None:
    (folder / import_finder.STAND_INS).mkdir(parents=True)
    (folder / import_finder.IMPORTED).mkdir()
    folder.chmod(0o755)
    lines = []
    copies = [folder / "sitecustomize.py"]
    for tree, _, plan in plans:
        stand_in = folder / import_finder.STAND_INS / tree.package
        stand_in.mkdir()
        copies.append(stand_in / "__init__.py")
        for change in plan.changes:
            if change.new is not None:
                source = Path(SOURCES, tree.package, change.path)
                (folder / source).parent.mkdir(parents=True, exist_ok=True)
                (folder / source).write_bytes(change.new)
                name = _module_name(tree.package, change.path)
                facts = _sha256(change), _identity(tree, change)
                lines.append(f"{name} {' '.join(facts)} {source}\n")
    (folder / import_finder.MODULES).write_text("".join(lines))
    for copy in copies:
        # Python would make it by the umask of the process.
        (copy.parent / "__pycache__").mkdir()
        shutil.copyfile(import_finder.__file__, copy)


def python_path(folder: Path, behind: str = "") -> str:
    """Return the PYTHONPATH that has the overlay in `folder`, and `behind` it."""
    places = [str(folder), str(folder / import_finder.STAND_INS), behind]
    return os.pathsep.join(filter(None, places))


def never_imported(folder: Path) -> tuple[list[str], bool]:
    """List the replaced modules that no process has imported; say if none has any."""
    lines = (folder / import_finder.MODULES).read_text().splitlines()
    modules = {name: sha256 for name, sha256, *_ in map(str.split, lines)}
    imported = {path.name for path in (folder / import_finder.IMPORTED).iterdir()}
    never = [name for name, of in modules.items() if of != import_finder.ADDED]
    return [name for name in never if name not in imported], not imported


def _sha256(change: Change) -> str:
    if change.old is None:
        return import_finder.ADDED
    return hashlib.sha256(change.old).hexdigest()


def _identity(tree: Tree, change: Change) -> str:
    """Return size and time of a file that was planned for, "-" if it is another now."""
    try:
        status = (tree.root / change.path).stat()
    except OSError:
        return "-"
    is_same = change.old is not None and tree.read(change.path) == change.old
    return import_finder.identity_of(status) if is_same else "-"


def _module_name(package: str, path: str) -> str:
    parts = [package, *PurePosixPath(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
