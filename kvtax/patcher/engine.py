# SPDX-License-Identifier: Apache-2.0
"""Actions on a tree: apply and revert first finish a killed call, others only read."""

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .blocks import Added, Block, Parsed
from .choice import active_blocks
from .errors import BlockPatchError, UnfinishedError
from .journal import commit, pending, recover
from .lock import locked, require_unlocked
from .patch import BlockSpec, Patch, resolve_parameters
from .plan import Plan, Survey, patches_in, plan_apply, plan_revert, survey
from .target import Tree


def apply(
    tree: Tree,
    patches: Iterable[Patch],
    parameters: Mapping[str, Any] | None = None,
) -> Plan:
    """Apply all of ``patches`` to ``tree``, or none; already applied ones are renewed.

    ``parameters`` maps names to values (plain Python literals); a name goes to every
    patch that declares it, and others keep their defaults. Returns the plan that was
    carried out. Raises BlockPatchError, the tree as it was.
    """
    with locked(tree):
        recover(tree)
        plan = plan_apply(tree, patches, parameters)
        note = commit(tree, plan)
    return replace(plan, note=note)


def revert(
    tree: Tree,
    names: Iterable[str],
    known: Mapping[str, Patch] | None = None,
    discard_edits: bool = False,
) -> Plan:
    """Take patches out of ``tree``; names that are not applied are fine.

    Needs no manifest; those of ``known`` patches let a refusal show what was edited,
    and say what earlier patches they replace. ``discard_edits`` takes edited blocks
    out, too, and leaves a copy of the file. Raises BlockPatchError, the tree as it was.
    """
    names = [names] if isinstance(names, str) else names
    with locked(tree):
        recover(tree)
        plan = plan_revert(tree, names, known, discard_edits)
        note = commit(tree, plan)
    tree.remove_if_empty()
    return replace(plan, note=note)


def patches_in_tree(tree: Tree, known: Mapping[str, Patch]) -> set[str]:
    """Return the names of the patches that are in ``tree``; writes nothing."""
    return patches_in(survey(tree, known, known).files)


def check(
    tree: Tree,
    patches: Iterable[Patch],
    parameters: Mapping[str, Any] | None = None,
) -> Plan:
    """Return the plan that ``apply`` would carry out; write nothing. Raises like it.

    Raises UnfinishedError too, if a killed call left something: ``apply`` would start
    from a tree in which that is dealt with.
    """
    require_unlocked(tree)
    if left := pending(tree):
        raise UnfinishedError(f"{tree.root}: {left}")
    return plan_apply(tree, patches, parameters)


def split_by_package(
    patches: Sequence[Patch],
    parameters: Mapping[str, Any],
    tree_of: Callable[[str], Tree],
) -> list[tuple[Tree, list[Patch], dict[str, Any]]]:
    """Split patches and parameters by package, for `check` or `apply` of each tree.

    Raises ParameterError for a parameter that no patch has.
    """
    resolve_parameters({patch.name: patch.parameters for patch in patches}, parameters)
    jobs = []
    for package in dict.fromkeys(patch.package for patch in patches):
        mine = [patch for patch in patches if patch.package == package]
        own = {name for patch in mine for name in patch.parameters}
        given = {name: value for name, value in parameters.items() if name in own}
        jobs.append((tree_of(package), mine, given))
    return jobs


def diff(
    tree: Tree, patches: Iterable[Patch], parameters: Mapping[str, Any] | None = None
) -> str:
    """Return the diff from ``tree`` without ``patches`` to it with them applied."""
    return check(tree, patches, parameters).diff()


@dataclass(frozen=True)
class PatchStatus:
    """State of one patch in a tree.

    ``state``: ``applied``, ``not applied``, ``partial`` (blocks are missing),
    ``edited`` (by hand), ``outdated`` (applied whole, but not as the manifest has it
    now). Without a manifest ``applied`` means that intact blocks are there, and
    ``sha256`` is None. ``parameters`` are the values in the tree, ``misfit`` is why a
    patch that is not applied does not fit.
    """

    name: str
    state: str
    files: tuple[str, ...] = ()
    sha256: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    misfit: str = ""


def status(
    tree: Tree, patches: Iterable[Patch] = (), damaged: list[str] | None = None
) -> dict[str, PatchStatus]:
    """Return by name the status of ``patches`` and of all others in ``tree``.

    Writes nothing; ``pending`` reports the change of a killed call. Raises DamagedError
    for a file with half a block, or lists it in ``damaged``.
    """
    require_unlocked(tree)
    known = {patch.name: patch for patch in patches}
    surveyed = survey(tree, known, known, damaged)
    return {
        name: _status(tree, name, known.get(name), surveyed)
        for name in sorted(known.keys() | patches_in(surveyed.files))
    }


def _status(
    tree: Tree, name: str, patch: Patch | None, surveyed: Survey
) -> PatchStatus:
    blocks: dict[tuple[str, str], Block] = {}
    added: dict[str, Added] = {}
    for path, file in surveyed.files.items():
        if isinstance(file, Parsed):
            blocks |= {(path, b.id): b for b in file.blocks if b.patch == name}
        elif name in file.owners:
            added[path] = file
    files = tuple(sorted({path for path, _ in blocks} | added.keys()))
    sha256 = patch.sha256 if patch else None
    if not files:
        misfit = _misfit(tree, patch, surveyed) if patch else ""
        return PatchStatus(name, "not applied", sha256=sha256, misfit=misfit)
    edited = any(b.edited for b in blocks.values())
    if edited or any(a.edited for a in added.values()):
        return PatchStatus(name, "edited", files, sha256)
    if patch is None:
        return PatchStatus(name, "applied", files)
    values: dict[str, Any] = {}
    try:
        active = active_blocks(tree, patch, surveyed.ours)
        specs = {(spec.file, spec.id): spec for spec in active}
        for key in specs.keys() & blocks.keys():
            values |= _values_in(specs[key], blocks[key])
        same = not plan_apply(tree, [patch], values, surveyed).changes
        whole = specs.keys() <= blocks.keys() and patch.files.keys() <= added.keys()
    except BlockPatchError:
        same, whole = False, True
    state = "applied" if same else "outdated" if whole else "partial"
    return PatchStatus(name, state, files, sha256, values)


def _misfit(tree: Tree, patch: Patch, surveyed: Survey) -> str:
    try:
        plan_apply(tree, [patch], None, surveyed)
    except BlockPatchError as error:
        return str(error)
    return ""


def _values_in(spec: BlockSpec, block: Block) -> dict[str, Any]:
    """Read the parameter values out of ``block``; empty if the code differs."""
    lines = (line.removeprefix(block.indent).rstrip(b"\r\n") for line in block.code)
    code = b"\n".join(lines).decode(errors="replace") + "\n"
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
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
