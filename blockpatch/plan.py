# SPDX-License-Identifier: Apache-2.0
"""What applying or reverting patches would change, worked out in memory.

Anchors are looked up in the pristine text, all blocks of all patches stripped, so the
order in which patches come and go does not matter. Reverting is applying nothing.
"""

import difflib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .anchors import BOM, Source
from .blocks import (
    Added,
    Block,
    Parsed,
    check_overlaps,
    code_lines,
    line_ending,
    parse,
    parse_added,
    render,
    render_added,
)
from .errors import (
    AnchorError,
    BlockPatchError,
    CompileError,
    ConflictError,
    DamagedError,
    TargetError,
)
from .parameters import fill, resolve_parameters
from .patch import BlockSpec, Patch
from .target import Tree

Survey = dict[str, Parsed | Added]
Wanted = tuple[Patch, BlockSpec, str]  # the string: code with its parameters


@dataclass(frozen=True)
class Change:
    """One file: bytes now, without the patches concerned, and as planned.

    None stands for no file. ``dirs`` innermost parent directories belong to the
    patches: made if missing, removed with the file if then empty.
    """

    path: str
    old: bytes | None
    bare: bytes | None
    new: bytes | None
    dirs: int = 0

    @property
    def kind(self) -> str:
        """``added``, ``removed`` or ``changed``."""
        if self.old is None:
            return "added"
        return "removed" if self.new is None else "changed"

    def own_dirs(self) -> list[str]:
        """The patches' directories around the file, outermost first."""
        return [str(parent) for parent in Path(self.path).parents[: self.dirs]][::-1]


@dataclass(frozen=True)
class Plan:
    """All files the patches touch; ``changes`` are those that differ from now.

    ``removed`` names the patches that are in the tree and will not be.
    """

    files: tuple[Change, ...]
    removed: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[Change, ...]:
        return tuple(file for file in self.files if file.old != file.new)

    def diff(self) -> str:
        """Unified diff from the tree without the patches to the tree with them."""
        return "".join(_diff(file) for file in self.files)


def survey(tree: Tree) -> Survey:
    """Every file of the tree that holds blocks. Raises DamagedError."""
    return {
        path: parse_added(text, path) or parse(text, path)
        for path, text in tree.scan().items()
    }


def plan_apply(
    tree: Tree,
    patches: Iterable[Patch],
    parameters: Mapping[str, Any] | None = None,
    found: Survey | None = None,
) -> Plan:
    """The plan that makes ``patches`` applied. Raises BlockPatchError on any misfit."""
    patches = list(patches)
    found = survey(tree) if found is None else found
    _refuse_conflicts(patches, found)
    declared = {patch.name: patch.parameters for patch in patches}
    values = resolve_parameters(declared, parameters)
    blocks: dict[str, list[Wanted]] = {}
    added: dict[str, dict[str, bytes]] = {}
    for patch in patches:
        for spec in active_blocks(tree, patch):
            code = fill(spec.code, values[patch.name])
            blocks.setdefault(spec.file, []).append((patch, spec, code))
        for path, content in patch.files.items():
            added.setdefault(path, {})[patch.name] = content
    return _plan(tree, {patch.name for patch in patches}, blocks, added, found)


def plan_revert(tree: Tree, names: Iterable[str]) -> Plan:
    """The plan that takes the named patches out; it needs no manifest."""
    names, found = set(names), survey(tree)
    removed = tuple(sorted(names & _all_patches_in(found)))
    return Plan(_plan(tree, names, {}, {}, found).files, removed)


def _refuse_conflicts(patches: Iterable[Patch], found: Survey) -> None:
    together = {patch.name for patch in patches} | _all_patches_in(found)
    for patch in patches:
        for kind, other, why in patch.relations:
            if kind == "conflicts" and other in together:
                raise ConflictError(
                    f"patches {patch.name} and {other} cannot be in one tree: {why}; "
                    "leave out or revert one of them"
                )


def active_blocks(tree: Tree, patch: Patch) -> list[BlockSpec]:
    """The blocks of ``patch`` for this tree. Raises TargetError if it does not fit."""
    if patch.package != tree.package:
        raise TargetError(
            f"patch {patch.name} is for package {patch.package}, not {tree.package}"
        )
    if tree.version is None and patch.ranged:
        raise TargetError(
            f"patch {patch.name} depends on the version of {tree.package}, and "
            f"{tree.root} does not tell it (no _version.py, no metadata beside it)"
        )
    if not patch.is_needed(tree.version):
        since = patch.since and f"from {patch.since} on"
        before = patch.before_version and f"before {patch.before_version}"
        when = " and ".join(filter(None, (since, before)))
        raise TargetError(
            f"patch {patch.name} is needed {when} only, and this is {tree.package} "
            f"{tree.version}: leave it out"
        )
    active = [spec for spec in patch.blocks if spec.active(tree.version)]
    if patch.blocks and not active:
        raise TargetError(
            f"patch {patch.name} has no block for {tree.package} {tree.version}; "
            f"tested with {', '.join(patch.tested)}"
        )
    return active


def _plan(
    tree: Tree,
    names: set[str],
    blocks: Mapping[str, list[Wanted]],
    added: Mapping[str, dict[str, bytes]],
    found: Survey,
) -> Plan:
    paths = {path for path, file in found.items() if names & _patches_in(file)}
    files = []
    for path in sorted(paths | blocks.keys() | added.keys()):
        existing = found.get(path)
        if path in added and path in blocks:
            raise ConflictError(f"{path}: one patch adds it, another has blocks in it")
        if path in added or isinstance(existing, Added):
            if path in blocks:
                raise ConflictError(
                    f"{path}: patch {'+'.join(existing.owners)} added this file, so "
                    f"block {blocks[path][0][1].id} cannot go into it"
                )
            files.append(_plan_added(tree, path, names, added.get(path, {}), found))
        else:
            files.append(_plan_blocks(tree, path, names, blocks.get(path, [])))
    return Plan(tuple(files))


def _all_patches_in(found: Survey) -> set[str]:
    return set().union(*map(_patches_in, found.values()))


def _patches_in(file: Parsed | Added) -> set[str]:
    if isinstance(file, Added):
        return set(file.owners)
    return {block.patch for block in file.blocks}


def _plan_blocks(
    tree: Tree, path: str, names: set[str], wanted: Sequence[Wanted]
) -> Change:
    text = tree.read(path)
    if text is None:
        patch, spec, _ = wanted[0]
        raise TargetError(
            f"{path}: no such file in {tree.package} {tree.version or ''}, needed by "
            f"block {patch.name}:{spec.id}; the patch does not fit this release"
        )
    lines, present = parse(text, path)
    for block in present:
        if block.edited:
            raise DamagedError(
                f"{path}: block {block.name} was edited by hand; put its lines back, "
                "or restore the file from the package"
            )
    kept = [block for block in present if block.patch not in names]
    if not wanted:
        new = render(lines, kept)
        return Change(path, text, new, new)
    source = Source(lines, path)
    placed = [_place(source, *item) for item in wanted]
    check_overlaps([*kept, *placed], path)
    new = render(lines, [*kept, *placed])
    if new != text:
        _check_result(path, new, names)
    return Change(path, text, render(lines, kept), new)


def _place(source: Source, patch: Patch, spec: BlockSpec, code: str) -> Block:
    name = f"{patch.name}:{spec.id}"
    try:
        statement = source.find(spec.scope, spec.anchor)
    except AnchorError as error:
        raise AnchorError(
            f"{error} (block {name}); the patch does not fit this release"
        ) from None
    lines = source.lines
    if statement.start == 0 and lines[0].startswith(BOM) and spec.where != "after":
        raise AnchorError(
            f"{source.file}: block {name} would come before the byte order mark"
        )
    if source.encoding not in ("utf-8", "utf-8-sig") and not code.isascii():
        raise TargetError(
            f"{source.file} is encoded as {source.encoding}; the code of block {name} "
            "must be ASCII there"
        )
    if any(line.endswith(b"\r") for line in lines):
        raise TargetError(
            f"{source.file}: lines that end in a bare carriage return cannot be patched"
        )
    return Block(
        patch=patch.name,
        id=spec.id,
        where=spec.where,
        order=spec.order,
        at=statement.end if spec.where == "after" else statement.start,
        until=statement.start if spec.where == "before" else statement.end,
        indent=statement.indent,
        code=code_lines(code, statement.indent, line_ending(lines)),
    )


def _plan_added(
    tree: Tree, path: str, names: set[str], wanted: dict[str, bytes], found: Survey
) -> Change:
    text = tree.read(path)
    present = None if text is None else parse_added(text, path)
    if text is not None and present is None:
        raise ConflictError(
            f"{path}: patch {' and '.join(wanted)} wants to add this file, but the "
            "package has one of its own; the patch does not fit this release"
        )
    if present and present.edited:
        raise DamagedError(
            f"{path}: this file was added by patch {'+'.join(present.owners)} and then "
            "edited by hand; put its lines back, or delete it"
        )
    kept = [name for name in present.owners if name not in names] if present else []
    contents = set(wanted.values()) | ({present.content} if present and kept else set())
    if len(contents) > 1:
        raise ConflictError(
            f"{path}: patches {', '.join(sorted({*kept, *wanted}))} add this file with "
            "different content; revert the others first, or apply them all together"
        )
    dirs = present.dirs if present else _count_own_dirs(tree, path, found)

    def text_for(owners: Iterable[str]) -> bytes | None:
        names = tuple(sorted(set(owners)))
        return render_added(Added(path, names, dirs, *contents)) if names else None

    new = text_for([*kept, *wanted])
    if wanted and new is not None and new != text:
        _check_result(path, new, names)
    return Change(path, text, text_for(kept), new, dirs)


def _count_own_dirs(tree: Tree, path: str, found: Survey) -> int:
    """How many innermost parents are missing, or made by patches before."""
    made = {
        parent
        for other in found.values()
        if isinstance(other, Added)
        for parent in list(Path(other.path).parents)[: other.dirs]
    }
    count = 0
    for parent in list(Path(path).parents)[:-1]:
        if parent not in made and (tree.root / parent).exists():
            break
        count += 1
    return count


def _check_result(path: str, text: bytes, names: set[str]) -> None:
    """The file must compile, and revert must find in it what was put there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, path, "exec", dont_inherit=True)
        parse_added(text, path) or parse(text, path)
    except (SyntaxError, ValueError, BlockPatchError) as error:
        raise CompileError(
            f"{path}: with {', '.join(sorted(names))} the file would not compile: "
            f"{error}; the patch does not fit this release"
        ) from None


def _diff(file: Change) -> str:
    bare, new = (
        (text or b"").decode(errors="replace").splitlines(keepends=True)
        for text in (file.bare, file.new)
    )
    names = [
        "/dev/null" if text is None else f"{side}/{file.path}"
        for side, text in (("a", file.bare), ("b", file.new))
    ]
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(bare, new, *names)
    )
