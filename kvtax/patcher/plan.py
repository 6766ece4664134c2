# SPDX-License-Identifier: Apache-2.0
"""Plan of the changes to a tree, computed in memory.

Anchors are looked up in the pristine text, all blocks of all patches stripped, so the
order in which patches come and go does not matter. Reverting is applying nothing.
"""

import difflib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .anchors import BOM, Source
from .blocks import (
    MARK,
    Added,
    Block,
    Ours,
    Parsed,
    check_overlaps,
    code_lines,
    fingerprint,
    line_ending,
    make_block,
    parse,
    read,
    render,
    render_added,
    was_lines,
)
from .choice import active_blocks
from .errors import (
    AnchorError,
    CompileError,
    ConflictError,
    DamagedError,
    TargetError,
)
from .patch import BlockSpec, Patch, fill, resolve_parameters
from .target import Tree
from .uses import require_only

Files = Mapping[str, Parsed | Added]
Wanted = tuple[Patch, BlockSpec, str]  # the string: code with its parameters


@dataclass(frozen=True)
class Change:
    """One file: bytes now, without the patches concerned, and as planned.

    None stands for no file. Parent directories are made if missing, and removed with
    the file if then empty.
    """

    path: str
    old: bytes | None
    bare: bytes | None
    new: bytes | None

    @property
    def kind(self) -> str:
        """``added``, ``removed`` or ``changed``."""
        if self.old is None:
            return "added"
        return "removed" if self.new is None else "changed"


@dataclass(frozen=True)
class Plan:
    """All files the patches touch; ``changes`` are those that differ from now.

    ``removed`` names the patches that are in the tree and will not be, ``left`` those
    that will. ``unfit`` has by patch the optional blocks that are left out. ``added``
    are the paths that the patches add, or added. ``note`` tells what the call that
    carried it out left behind.
    """

    files: tuple[Change, ...]
    removed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    unfit: Mapping[str, Sequence[str]] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    note: str = ""

    @property
    def changes(self) -> tuple[Change, ...]:
        """Files that change."""
        return tuple(file for file in self.files if file.old != file.new)

    def diff(self) -> str:
        """Return the diff from the tree without the patches to the tree with them."""
        return "".join(_diff(file) for file in self.files)


class Survey(NamedTuple):
    """Files of a tree that hold blocks, and the patches that are ours, with ids."""

    files: Files
    ours: dict[str, Collection[str] | None]


def survey(
    tree: Tree,
    names: Iterable[str],
    known: Mapping[str, Patch],
    damaged: list[str] | None = None,
) -> Survey:
    """Parse every file of the tree that holds blocks.

    Ours are the patches of these names, and those that have an intact block in the
    tree. Of a `known` patch only the blocks that its manifest has are ours in whatever
    state. Raises DamagedError for half a block of ours, or lists it in `damaged`.
    """
    texts = tree.scan(MARK)
    ours = {name: _ids(known.get(name)) for name in names}
    intact = patches_in(_read_all(texts, ours, []), intact=True)
    ours |= {name: _ids(known.get(name)) for name in intact}
    return Survey(_read_all(texts, ours, damaged), ours)


def _ids(patch: Patch | None) -> Collection[str] | None:
    return {*(spec.id for spec in patch.blocks), *patch.files} if patch else None


def _read_all(
    texts: Mapping[str, bytes], ours: Ours, damaged: list[str] | None
) -> Files:
    surveyed = {}
    for path, text in texts.items():
        try:
            file = read(text, path, ours)
        except DamagedError as error:
            if damaged is None:
                raise
            damaged.append(str(error))
            continue
        if isinstance(file, Added) or file.blocks:
            surveyed[path] = file
    return surveyed


def plan_apply(
    tree: Tree,
    patches: Iterable[Patch],
    parameters: Mapping[str, Any] | None = None,
    surveyed: Survey | None = None,
) -> Plan:
    """Plan to apply ``patches``. Raises BlockPatchError on any misfit."""
    patches = list(patches)
    names = {patch.name for patch in patches}
    known = {patch.name: patch for patch in patches}
    surveyed = surveyed or survey(tree, names, known)
    names |= {old for patch in patches for old in patch.replaces}
    there = patches_in(surveyed.files)
    _refuse_conflicts(patches, there - names)
    declared = {patch.name: patch.parameters for patch in patches}
    values = resolve_parameters(declared, parameters)
    blocks: dict[str, list[Wanted]] = {}
    added: dict[str, dict[str, bytes]] = {}
    unfit: dict[str, list[str]] = {}
    for patch in patches:
        require_only(tree, patch, surveyed.ours)
        active = active_blocks(tree, patch, surveyed.ours)
        ids = {spec.id for spec in active}
        unfit[patch.name] = [s.id for s in patch.blocks if s.id not in ids]
        for spec in active:
            code = fill(spec.code, values[patch.name])
            blocks.setdefault(spec.file, []).append((patch, spec, code))
        for path, content in patch.files.items():
            added.setdefault(path, {})[patch.name] = content
    files = _plan(tree, names, blocks, added, surveyed, known)
    removed = tuple(sorted(there & names - known.keys()))
    return Plan(files, removed, unfit=unfit, added=_added_in(files, surveyed.files))


def plan_revert(
    tree: Tree,
    names: Iterable[str],
    known: Mapping[str, Patch] | None = None,
    discard_edits: bool = False,
) -> Plan:
    """Plan to take patches out, and what they replace; needs no manifest.

    A refusal shows how edited blocks differ from ``known`` patches; ``discard_edits``
    plans to take them out and to keep copies of the files.
    """
    known, wanted = known or {}, set(names)
    surveyed = survey(tree, wanted | known.keys(), known)
    there = patches_in(surveyed.files)
    wanted |= {old for name in wanted & known.keys() for old in known[name].replaces}
    out = wanted & there
    files = _plan(tree, out, {}, {}, surveyed, known, discard_edits)
    ours = _added_in(files, surveyed.files)
    if discard_edits:
        files += tuple(_copies(tree, files, surveyed.files, out))
    left = tuple(sorted(there - out))
    return Plan(files, tuple(sorted(out)), left, added=ours)


def _added_in(files: Sequence[Change], here: Files) -> tuple[str, ...]:
    return tuple(
        file.path
        for file in files
        if file.bare is None or isinstance(here.get(file.path), Added)
    )


def _copies(
    tree: Tree, files: Sequence[Change], surveyed: Files, names: set[str]
) -> Iterable[Change]:
    """Plan a copy of each file whose edits go: beside it, or, as the folder of an added
    file may go as well, in the package directory."""
    for change in files:
        file = surveyed[change.path]
        path = change.path
        if isinstance(file, Parsed):
            edited = any(block.edited for block in file.blocks if block.patch in names)
        else:
            edited, path = file.edited, path.replace("/", ".")
        if edited and change.new != change.old:
            numbers = ("", *map(str, range(2, 1000)))
            paths = (f"{path}.edited{number}" for number in numbers)
            free = next(path for path in paths if not (tree.root / path).exists())
            yield Change(free, None, None, change.old)


def _refuse_conflicts(patches: Sequence[Patch], there: set[str]) -> None:
    together = {patch.name for patch in patches} | there
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
    surveyed: Survey,
    known: Mapping[str, Patch],
    discard_edits: bool = False,
) -> tuple[Change, ...]:
    here = surveyed.files
    paths = {path for path in here if names & patches_in({path: here[path]})}
    files = []
    for path in sorted(paths | blocks.keys() | added.keys()):
        existing = here.get(path)
        if path in added and path in blocks:
            raise ConflictError(f"{path}: one patch adds it, another has blocks in it")
        if isinstance(existing, Added) and path in blocks:
            raise ConflictError(
                f"{path}: patch {'+'.join(existing.owners)} added this file, so "
                f"block {blocks[path][0][1].id} cannot go into it"
            )
        if path in added or isinstance(existing, Added):
            wanted = added.get(path, {})
            present = existing if isinstance(existing, Added) else None
            gone = present is not None and names >= set(present.owners)
            if present and present.edited and not (discard_edits and gone):
                raise edited_file(present, known)
            files.append(_plan_added(tree, path, names, wanted, present))
        else:
            if isinstance(existing, Parsed):
                for block in existing.blocks:
                    mine = block.patch in names and not discard_edits
                    if block.torn or (block.edited and mine):
                        raise edited_block(existing, block, path, known)
            specs = blocks.get(path, [])
            files.append(_plan_blocks(tree, path, names, specs, surveyed.ours))
    return tuple(files)


def patches_in(files: Files, intact: bool = False) -> set[str]:
    """Return the names of the patches that are in files, or with an `intact` block."""
    names: set[str] = set()
    for file in files.values():
        if isinstance(file, Parsed):
            blocks = (block for block in file.blocks if not (intact and block.edited))
            names.update(block.patch for block in blocks)
        elif not (intact and file.edited):
            names.update(file.owners)
    return names


def _plan_blocks(
    tree: Tree,
    path: str,
    names: set[str],
    wanted: Sequence[Wanted],
    ours: Ours,
) -> Change:
    text = tree.read(path)
    if text is None:
        patch, spec, _ = wanted[0]
        raise TargetError(
            f"{path}: no such file in {tree.title}, needed by "
            f"block {patch.name}:{spec.id}; the patch does not fit this release"
        )
    lines, present = parse(text, path, ours)
    kept = [block for block in present if block.patch not in names]
    if not wanted:
        new = render(lines, kept)
        if _compiles(text, path):
            # What somebody put into a block of ours may need it.
            _check_result(path, new, names, "without")
        return Change(path, text, new, new)
    source = Source(lines, path)
    placed = [_place(source, patch, spec, code) for patch, spec, code in wanted]
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
    at = statement.end if spec.where == "after" else statement.start
    until = statement.start if spec.where == "before" else statement.end
    return make_block(
        (patch.name, spec.id),
        lines,
        (at, until),
        statement.indent,
        code,
        (spec.where == "before", spec.order),
    )


def _plan_added(
    tree: Tree,
    path: str,
    names: set[str],
    wanted: dict[str, bytes],
    present: Added | None,
) -> Change:
    text = tree.read(path)
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

    def text_for(owners: Iterable[str]) -> bytes | None:
        if not owners:
            return None
        (content,) = contents
        return render_added(Added(path, tuple(sorted({*owners})), content))

    new = text_for([*kept, *wanted])
    if wanted and new is not None and new != text:
        _check_result(path, new, names)
    return Change(path, text, text_for(kept), new)


def _check_result(path: str, text: bytes, names: set[str], how: str = "with") -> None:
    try:
        _compile(text, path)
    except (SyntaxError, ValueError) as error:
        raise CompileError(
            f"{path}: {how} {', '.join(sorted(names))} the file would not compile: "
            f"{error}; the patch does not fit this file"
        ) from None


def _compiles(text: bytes, path: str) -> bool:
    try:
        _compile(text, path)
    except (SyntaxError, ValueError):
        return False
    return True


def _compile(text: bytes, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(text, path, "exec", dont_inherit=True)


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
    was = was_lines(displaced, block.indent, line_ending(file.lines))
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
            if fingerprint(ours) == block.check:
                return f"{block.name} as applied", ours
    return f"{block.name} in its patch now" if ours else "no such patch here", ours


def _edits(ours: Iterable[bytes], now: Iterable[bytes], title: str, path: str) -> str:
    old, new = (
        [line.decode(errors="replace").rstrip("\r\n") for line in lines]
        for lines in (ours, now)
    )
    return "\n".join(difflib.unified_diff(old, new, title, f"{path} now", lineterm=""))
