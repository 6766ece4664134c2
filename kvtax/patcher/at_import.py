# SPDX-License-Identifier: Apache-2.0
"""Apply patches to modules as they are imported; the package's files stay untouched.

    plans = plan_imports(patches, parameters, tree_of)
    write_overlay(folder, plans)             # folder goes onto PYTHONPATH

The plan is that of `apply`: the same anchors, the same refusals, the same text. It is
made once and written to an overlay, from which every process below takes its modules
(import_finder.py): interpreters of another version or environment, too.
"""

import hashlib
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
    """Write the planned modules and their finder into `folder`, for PYTHONPATH."""
    lines = []
    for tree, _, plan in plans:
        for change in plan.changes:
            if change.new is not None:
                source = Path(SOURCES, tree.package, change.path)
                (folder / source).parent.mkdir(parents=True, exist_ok=True)
                (folder / source).write_bytes(change.new)
                name = _module_name(tree.package, change.path)
                lines.append(f"{name} {_sha256(change)} {source}\n")
    (folder / import_finder.MODULES).write_text("".join(lines))
    shutil.copyfile(import_finder.__file__, folder / "sitecustomize.py")


def _sha256(change: Change) -> str:
    if change.old is None:
        return import_finder.ADDED
    return hashlib.sha256(change.old).hexdigest()


def _module_name(package: str, path: str) -> str:
    parts = [package, *PurePosixPath(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
