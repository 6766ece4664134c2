# SPDX-License-Identifier: Apache-2.0
"""Lines in a package's RECORD for added files, so that an uninstall removes them.

Installers give each source file a hash; lines of ours have none and come first.
"""

import os
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from .below import move, read_below, remove, status_below, store
from .blocks import line_ending
from .errors import TargetError
from .target import JOURNAL, Tree


def record_of(tree: Tree) -> str | None:
    """Return the path of the package's RECORD from the folder around the package.

    None without one, or where it cannot be replaced as the package's own files can.
    """
    around = tree.root.parent
    line = f"{tree.package}/__init__.py,".encode()
    names = sorted(path.parent.name for path in around.glob("*.dist-info/RECORD"))
    names.sort(key=lambda name: not name.startswith(tree.package))
    for name in names:
        path = f"{name}/RECORD"
        try:
            text = read_below(around, path) or b""
        except (OSError, TargetError):  # a link, or not to be read
            continue
        if any(own.startswith(line) for own in text.splitlines()):
            return path if _is_replaceable(around / name, tree.root) else None
    return None


def _is_replaceable(folder: Path, root: Path) -> bool:
    return folder.stat().st_dev == root.stat().st_dev and os.access(folder, os.W_OK)


def updated_record(
    tree: Tree, added: Iterable[str], is_there: Iterable[str]
) -> tuple[str, bytes] | None:
    """Return path and text of the RECORD if it must change, else None.

    Of the paths `added`, those that are `is_there` have a line in it.
    """
    added, present = set(added), set(is_there)
    path = record_of(tree) if added else None
    text = read_below(tree.root.parent, path) if path else None
    if path is None or text is None:
        return None
    lines = text.splitlines(keepends=True)
    ends = b".py,," + line_ending(lines)
    package = f"{tree.package}/".encode()
    first = [
        *takewhile(lambda line: line.startswith(package) and line.endswith(ends), lines)
    ]
    ours = {name: package + name.removesuffix(".py").encode() + ends for name in added}
    kept = set(first) - set(ours.values()) | {ours[name] for name in added & present}
    new = b"".join([*sorted(kept), *lines[len(first) :]])
    return (path, new) if new != text else None


def write_record(tree: Tree, added: Iterable[str]) -> None:
    """Bring the RECORD in line with the `added` files that are there. Raises OSError.

    The journal's directory must be there.
    """
    added = [path for path in added if path.endswith(".py")]
    there = [path for path in added if status_below(tree.root, path)]
    if update := updated_record(tree, added, there):
        path, text = update
        around = tree.root.parent
        remove(tree.root, f"{JOURNAL}/record")
        store(tree.root, f"{JOURNAL}/record", text, like=status_below(around, path))
        move(tree.root, f"{JOURNAL}/record", around, path)
