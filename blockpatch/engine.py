# SPDX-License-Identifier: Apache-2.0
"""The verbs. apply and revert first finish a killed call; the others only read."""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .blocks import Added, Block
from .errors import BlockPatchError, UnfinishedError
from .journal import commit, pending, recover
from .lock import locked, require_unlocked
from .patch import BlockSpec, Patch
from .plan import (
    Plan,
    Survey,
    active_blocks,
    plan_apply,
    plan_revert,
    survey,
)
from .target import Tree


def apply(
    tree: Tree, patches: Iterable[Patch], parameters: Mapping[str, Any] | None = None
) -> Plan:
    """Apply all of ``patches`` to ``tree``, or none; already applied ones are renewed.

    ``parameters`` maps names to values (plain Python literals); a name goes to every
    patch that declares it, and what is not given is at its default. Returns the plan
    that was carried out. Raises BlockPatchError, the tree as it was.
    """
    with locked(tree):
        recover(tree)
        plan = plan_apply(tree, patches, parameters)
        commit(tree, plan.changes)
    return plan


def revert(tree: Tree, names: Iterable[str]) -> Plan:
    """Take the named patches out of ``tree``; names that are not applied are fine.

    Needs no manifest. Raises BlockPatchError, the tree as it was.
    """
    names = [names] if isinstance(names, str) else names
    with locked(tree):
        recover(tree)
        plan = plan_revert(tree, names)
        commit(tree, plan.changes)
    return plan


def check(
    tree: Tree, patches: Iterable[Patch], parameters: Mapping[str, Any] | None = None
) -> Plan:
    """The plan that ``apply`` would carry out, nothing written. Raises like it.

    Raises UnfinishedError too, if a killed call left something: ``apply`` would start
    from a tree in which that is dealt with.
    """
    require_unlocked(tree)
    if left := pending(tree):
        raise UnfinishedError(f"{tree.root}: {left}")
    return plan_apply(tree, patches, parameters)


def diff(
    tree: Tree, patches: Iterable[Patch], parameters: Mapping[str, Any] | None = None
) -> str:
    """Unified diff from ``tree`` without ``patches`` to it with them applied."""
    return check(tree, patches, parameters).diff()


@dataclass(frozen=True)
class PatchStatus:
    """How one patch stands in a tree.

    ``state``: ``applied``, ``not applied``, ``partial`` (blocks are missing),
    ``edited`` (by hand), ``outdated`` (applied whole, but not as the manifest has it
    now). Without a manifest ``applied`` means that intact blocks are there, and
    ``sha256`` is None. ``parameters`` are the values in the tree.
    """

    name: str
    state: str
    files: tuple[str, ...] = ()
    sha256: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


def status(tree: Tree, patches: Iterable[Patch] = ()) -> dict[str, PatchStatus]:
    """Status by name of ``patches`` and of all others found in ``tree``, as it is now.

    Writes nothing; what a killed call left is for ``pending`` to say. Raises
    DamagedError if half a sentinel is in the tree.
    """
    require_unlocked(tree)
    found = survey(tree)
    known = {patch.name: patch for patch in patches}
    in_tree = {block.patch for _, block in _blocks(found)}
    in_tree |= {owner for added in _added(found) for owner in added.owners}
    return {
        name: _status(tree, name, known.get(name), found)
        for name in sorted(known.keys() | in_tree)
    }


def _blocks(found: Survey) -> Iterable[tuple[str, Block]]:
    for path, file in found.items():
        if not isinstance(file, Added):
            yield from ((path, block) for block in file.blocks)


def _added(found: Survey) -> Iterable[Added]:
    return (file for file in found.values() if isinstance(file, Added))


def _status(tree: Tree, name: str, patch: Patch | None, found: Survey) -> PatchStatus:
    blocks = {(p, b.id): b for p, b in _blocks(found) if b.patch == name}
    added = {file.path: file for file in _added(found) if name in file.owners}
    files = tuple(sorted({path for path, _ in blocks} | added.keys()))
    sha256 = patch.sha256 if patch else None
    if not files:
        return PatchStatus(name, "not applied", sha256=sha256)
    if any(item.edited for item in [*blocks.values(), *added.values()]):
        return PatchStatus(name, "edited", files, sha256)
    if patch is None:
        return PatchStatus(name, "applied", files)
    values: dict[str, Any] = {}
    try:
        specs = {(spec.file, spec.id): spec for spec in active_blocks(tree, patch)}
        for key in specs.keys() & blocks.keys():
            values |= _values_in(specs[key], blocks[key])
        same = not plan_apply(tree, [patch], values, found).changes
        missing = specs.keys() - blocks.keys() or patch.files.keys() - added.keys()
    except BlockPatchError:
        same, missing = False, False
    state = "applied" if same else "partial" if missing else "outdated"
    return PatchStatus(name, state, files, sha256, values)


def _values_in(spec: BlockSpec, block: Block) -> dict[str, Any]:
    """The parameter values that ``block`` was written with; empty if it differs."""
    lines = (line.removeprefix(block.indent).rstrip(b"\r\n") for line in block.code)
    code = b"\n".join(lines).decode(errors="replace") + "\n"
    seen: set[str] = set()

    def group(match: re.Match) -> str:
        repeated = match[1] in seen
        seen.add(match[1])
        return f"(?P={match[1]})" if repeated else f"(?P<{match[1]}>.+?)"

    template = re.sub(r"@([A-Za-z_]\w*)@", group, re.escape(spec.code))
    match = re.fullmatch(template, code)
    if not match:
        return {}
    try:
        return {n: ast.literal_eval(text) for n, text in match.groupdict().items()}
    except (SyntaxError, ValueError):
        return {}
