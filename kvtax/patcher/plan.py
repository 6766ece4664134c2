# SPDX-License-Identifier: Apache-2.0
"""Plan of the changes to a tree, computed in memory.

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
    WAS,
    Added,
    Block,
    Parsed,
    Unreadable,
    check_overlaps,
    code_lines,
    fingerprint,
    line_ending,
    parse,
    parse_added,
    read,
    render,
    render_added,
)
from .choice import active_blocks
from .errors import (
    AnchorError,
    BlockPatchError,
    CompileError,
    ConflictError,
    DamagedError,
    TargetError,
)
from .patch import BlockSpec, Patch, fill, resolve_parameters
from .target import Tree

Survey = dict[str, Parsed | Added | Unreadable]
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
        """List the patches' directories around the file, outermost first."""
        return [str(parent) for parent in Path(self.path).parents[: self.dirs]][::-1]


@dataclass(frozen=True)
class Plan:
    """All files the patches touch; ``changes`` are those that differ from now.

    ``removed`` names the patches that are in the tree and will not be, ``kept`` those
    that a set is to leave there, ``unread`` says of files why they are left alone.
    """

    files: tuple[Change, ...]
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[Change, ...]:
        return tuple(file for file in self.files if file.old != file.new)

    def diff(self) -> str:
        """Return the diff from the tree without the patches to the tree with them."""
        return "".join(_diff(file) for file in self.files)


def survey(tree: Tree) -> Survey:
    """Parse every file of the tree that holds blocks."""
    return {path: read(text, path) for path, text in tree.scan().items()}


def unread(found: Survey) -> tuple[str, ...]:
    """List why files could not be read."""
    return tuple(file.why for file in found.values() if isinstance(file, Unreadable))


def plan_apply(
    tree: Tree,
    patches: Iterable[Patch],
    parameters: Mapping[str, Any] | None = None,
    found: Survey | None = None,
    named: bool = False,
) -> Plan:
    """Plan to apply ``patches``, ``named`` or as parts of a set.

    Raises BlockPatchError on any misfit.
    """
    patches = list(patches)
    found = survey(tree) if found is None else found
    by_name = _named_in(found) | {patch.name for patch in patches if named}
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
    names = {patch.name for patch in patches}
    known = {patch.name: patch for patch in patches}
    files = _plan(tree, names, blocks, added, found, by_name, known)
    return Plan(files, unread=unread(found))


def plan_revert(
    tree: Tree,
    names: Iterable[str],
    of_set: bool = False,
    known: Mapping[str, Patch] | None = None,
    discard_edits: bool = False,
) -> Plan:
    """Plan to take patches out; needs no manifest.

    ``of_set`` leaves those that were applied by name, too. A refusal shows how edited
    blocks differ from ``known`` patches; ``discard_edits`` plans to take them out and
    to keep copies of the files.
    """
    found = survey(tree)
    names, by_name = set(names) & _all_patches_in(found), _named_in(found)
    kept = names & by_name if of_set else set()
    out = names - kept
    files = _plan(tree, out, {}, {}, found, by_name, known or {}, discard_edits)
    if discard_edits:
        files += tuple(_copies(tree, files, found, out))
    removed = tuple(sorted(out - _in_unread(found)))
    return Plan(files, removed, tuple(sorted(kept)), unread(found))


def _copies(
    tree: Tree, files: Sequence[Change], found: Survey, names: set[str]
) -> Iterable[Change]:
    """Plan a copy beside each file whose edits go."""
    for change in files:
        file = found[change.path]
        if isinstance(file, Parsed):
            edited = any(block.edited for block in file.blocks if block.patch in names)
        else:
            edited = isinstance(file, Added) and file.edited
        if edited and change.new != change.old:
            numbers = ("", *map(str, range(2, 1000)))
            paths = (f"{change.path}.edited{number}" for number in numbers)
            free = next(path for path in paths if not (tree.root / path).exists())
            yield Change(free, None, None, change.old)


def _in_unread(found: Survey) -> set[str]:
    """Return the patches that unreadable files name, and may need."""
    files = [file for file in found.values() if isinstance(file, Unreadable)]
    return set().union(*(file.patches for file in files))


def _refuse_conflicts(patches: Iterable[Patch], found: Survey) -> None:
    together = {patch.name for patch in patches} | _all_patches_in(found)
    for patch in patches:
        for kind, other, why in patch.relations:
            if kind == "conflicts" and other in together:
                raise ConflictError(
                    f"patches {patch.name} and {other} cannot be in one tree: {why}; "
                    "leave out or revert one of them"
                )


def _plan(
    tree: Tree,
    names: set[str],
    blocks: Mapping[str, list[Wanted]],
    added: Mapping[str, dict[str, bytes]],
    found: Survey,
    by_name: set[str],
    known: Mapping[str, Patch],
    discard_edits: bool = False,
) -> tuple[Change, ...]:
    paths = {path for path, file in found.items() if names & _patches_in(file)}
    files = []
    for path in sorted(paths | blocks.keys() | added.keys()):
        existing = found.get(path)
        if path in added and path in blocks:
            raise ConflictError(f"{path}: one patch adds it, another has blocks in it")
        if isinstance(existing, Added) and path in blocks:
            raise ConflictError(
                f"{path}: patch {'+'.join(existing.owners)} added this file, so "
                f"block {blocks[path][0][1].id} cannot go into it"
            )
        if path in added or isinstance(existing, Added):
            wanted = added.get(path, {})
            # An unreadable file may still import what its patch added.
            going = names if wanted else names - _in_unread(found)
            present = existing if isinstance(existing, Added) else None
            gone = present is not None and going >= set(present.owners)
            if present and present.edited and going and not (discard_edits and gone):
                raise edited_file(present, known)
            files.append(_plan_added(tree, path, going, wanted, found, by_name))
        else:
            here = blocks.get(path, [])
            if isinstance(existing, Parsed):
                for block in existing.blocks:
                    mine = block.patch in names and not discard_edits
                    if block.torn or (block.edited and mine):
                        raise edited_block(existing, block, path, known)
            files.append(_plan_blocks(tree, path, names, here, by_name))
    return tuple(files)


def _all_patches_in(found: Survey) -> set[str]:
    return set().union(*map(_patches_in, found.values()))


def _named_in(found: Survey) -> set[str]:
    """Return the patches that were applied by name."""
    named: set[str] = set()
    for file in found.values():
        if isinstance(file, Added):
            named.update(file.named)
        elif isinstance(file, Parsed):
            named.update(block.patch for block in file.blocks if block.named)
    return named


def _patches_in(file: Parsed | Added | Unreadable) -> set[str]:
    if isinstance(file, Added):
        return set(file.owners)
    if isinstance(file, Unreadable):
        return set()
    return {block.patch for block in file.blocks}


def _plan_blocks(
    tree: Tree,
    path: str,
    names: set[str],
    wanted: Sequence[Wanted],
    by_name: set[str],
) -> Change:
    text = tree.read(path)
    if text is None:
        patch, spec, _ = wanted[0]
        raise TargetError(
            f"{path}: no such file in {tree.title}, needed by "
            f"block {patch.name}:{spec.id}; the patch does not fit this release"
        )
    lines, present = parse(text, path)
    kept = [block for block in present if block.patch not in names]
    if not wanted:
        new = render(lines, kept)
        return Change(path, text, new, new)
    source = Source(lines, path)
    placed = [
        _place(source, patch, spec, code, patch.name in by_name)
        for patch, spec, code in wanted
    ]
    check_overlaps([*kept, *placed], path)
    new = render(lines, [*kept, *placed])
    if new != text:
        _check_result(path, new, names)
    return Change(path, text, render(lines, kept), new)


def _place(
    source: Source, patch: Patch, spec: BlockSpec, code: str, named: bool
) -> Block:
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
        named=named,
    )


def _plan_added(
    tree: Tree,
    path: str,
    names: set[str],
    wanted: dict[str, bytes],
    found: Survey,
    by_name: set[str],
) -> Change:
    text = tree.read(path)
    present = None if text is None else parse_added(text, path)
    if text is not None and present is None:
        raise ConflictError(
            f"{path}: patch {' and '.join(wanted)} wants to add this file, but the "
            "package has one of its own; the patch does not fit this release"
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
        if not names:
            return None
        (content,) = contents
        named = tuple(name for name in names if name in by_name)
        return render_added(Added(path, names, dirs, content, named))

    new = text_for([*kept, *wanted])
    if wanted and new is not None and new != text:
        _check_result(path, new, names)
    return Change(path, text, text_for(kept), new, dirs)


def _count_own_dirs(tree: Tree, path: str, found: Survey) -> int:
    """Count the innermost parents that are missing, or were made by patches."""
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
    """Check that the file compiles, and that revert will find its blocks."""
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
    a = "/dev/null" if file.bare is None else f"a/{file.path}"
    b = "/dev/null" if file.new is None else f"b/{file.path}"
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(bare, new, a, b)
    )


_OUT = "or take it out with --revert --discard-edits, which keeps a copy"


def edited_block(
    file: Parsed, block: Block, path: str, known: Mapping[str, Patch]
) -> DamagedError:
    """Return the refusal of an edited block: what differs, and the ways out."""
    what = f"{path}: block {block.name} was edited by hand"
    if block.torn:
        return DamagedError(
            f"{what}, and lost lines that it replaced ('# WAS: '); put them back, or "
            "restore the file from the package"
        )
    displaced = file.lines[block.at : block.until]
    was = [block.indent + WAS + line for line in displaced]
    title, ours = _as_applied(file, block, path, was, known)
    diff = _edits(ours, [*was, *block.code], title, path)
    return DamagedError(f"{what}; put its lines back, {_OUT}:\n{diff}")


def edited_file(added: Added, known: Mapping[str, Patch]) -> DamagedError:
    """Return the refusal of an edited file that patches added."""
    owners = "+".join(added.owners)
    files = (known[name].files for name in added.owners if name in known)
    ours = next((own[added.path] for own in files if added.path in own), b"")
    lines = ours.splitlines(keepends=True), added.content.splitlines(keepends=True)
    diff = _edits(*lines, f"in patch {owners}", added.path)
    return DamagedError(
        f"{added.path}: this file was added by patch {owners} and then edited by hand; "
        f"put its lines back, {_OUT}:\n{diff}"
    )


def _as_applied(
    file: Parsed, block: Block, path: str, was: list[bytes], known: Mapping[str, Patch]
) -> tuple[str, list[bytes]]:
    """Return the block's lines, before the edit if a known patch still has these."""
    ours: list[bytes] = []
    patch = known.get(block.patch)
    for spec in patch.blocks if patch else ():
        if patch and (spec.file, spec.id) == (path, block.id):
            code = fill(spec.code, patch.parameters)
            eol = line_ending(file.lines)
            ours = [*was, *code_lines(code, block.indent, eol)]
            if fingerprint(ours) == block.edited:
                return f"{block.name} as applied", ours
    return f"{block.name} in its patch now" if ours else "no such patch here", ours


def _edits(ours: Iterable[bytes], now: Iterable[bytes], title: str, path: str) -> str:
    old, new = (
        [line.decode(errors="replace").rstrip("\r\n") for line in lines]
        for lines in (ours, now)
    )
    return "\n".join(difflib.unified_diff(old, new, title, f"{path} now", lineterm=""))
