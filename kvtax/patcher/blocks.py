# SPDX-License-Identifier: Apache-2.0
"""A patched file is pristine lines plus blocks; ``parse`` and ``render`` are inverses.

All text is bytes, so lines of others come back byte for byte. A block:

    # BLOCK_BEGIN <patch>:<id> <check> [was=<n>]
    # WAS: <one of n lines that a replace displaced, ending included>
    <the block's own lines>
    # BLOCK_END <patch>:<id> <check>

The check, 8 hex digits, is of the lines between the two, blanks at their ends left out.
Only a pair of this whole form is ours, whose check fits or whose patch and id are
known: any other BLOCK_BEGIN or BLOCK_END is somebody's text, and so are those inside of
a string. An added file is one block around the whole file, and its id is the path:

    # BLOCK_BEGIN <patch>[+<patch>...]:<path> <check>

An earlier kvtax wrote longer BEGIN lines, which are read as well (``_EARLIER``).
"""

import ast
import functools
import hashlib
import re
import textwrap
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import NamedTuple

from .errors import ConflictError, DamagedError

WAS = b"# WAS: "
MARK = b"# BLOCK_"
ADDED_ID = ".py"  # how the id of an added file ends, and no other
MOST_ENDS = 12  # comments among which two foreign blocks are looked for
_NAME = rb"([\w.+-]+):([\w./-]+)"
_BEGIN = re.compile(
    rb"([ \t]*)# BLOCK_BEGIN " + _NAME + rb" ([0-9a-f]{8})(?: was=(\d+))?\r?\n"
)
_END = re.compile(rb"[ \t]*# BLOCK_END " + _NAME + rb" [0-9a-f]{8}\r?\n")
_EARLIER = re.compile(
    rb"([ \t]*)# BLOCK_BEGIN " + _NAME + rb" sha256:([0-9a-f]{16}) "
    rb"(?:new-file dirs=\d+(?: named=[\w.+-]+)?"
    rb"|(?:before|after|replace) order=\d+(?: displaced=(\d+))?(?: named)?)\r?\n"
)


@dataclass(frozen=True)
class Block:
    """One block. It stands before pristine line ``at`` and displaces ``[at, until)``.

    ``text`` holds its lines, sentinels included. ``order`` is its place among blocks of
    its patch at the same line. ``edited``: the lines no longer fit the ``check``;
    ``torn``: not all displaced lines are there.
    """

    patch: str
    id: str
    at: int
    until: int
    indent: bytes
    text: tuple[bytes, ...]
    order: tuple[bool, int] = field(default=(False, 0), compare=False)
    edited: bool = field(default=False, compare=False)
    torn: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.patch}:{self.id}"

    @property
    def code(self) -> tuple[bytes, ...]:
        """Lines without sentinels and displaced lines."""
        return self.text[1 + self.until - self.at : -1]

    @property
    def check(self) -> str:
        """Check in the BEGIN line."""
        begin = _read_begin(self.text[0])
        assert begin
        return begin.check

    def sort_key(self) -> tuple[int, bool, int, str, tuple[bool, int]]:
        """Order what stands at one line: after inner statements first, replace last."""
        replaces = self.until > self.at
        return self.at, replaces, -len(self.indent), self.patch, self.order


class Parsed(NamedTuple):
    lines: tuple[bytes, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Added:
    """A whole file that patches added; ``owners`` are sorted."""

    path: str
    owners: tuple[str, ...]
    content: bytes
    edited: bool = field(default=False, compare=False)


class _Begin(NamedTuple):
    """A BEGIN line, and the END line that it needs."""

    indent: bytes
    patch: str
    id: str
    check: str
    displaced: int
    end: bytes
    is_earlier: bool


def _read_begin(line: bytes) -> _Begin | None:
    match = _BEGIN.fullmatch(line) or _EARLIER.fullmatch(line)
    if not match:
        return None
    indent, patch, id_, check, displaced = match.groups()
    end = indent + b"# BLOCK_END " + patch + b":" + id_
    if match.re is _BEGIN:
        end += b" " + check
    return _Begin(
        indent,
        patch.decode(),
        id_.decode(),
        check.decode(),
        int(displaced or 0),
        end,
        match.re is _EARLIER,
    )


def fingerprint(body: Iterable[bytes]) -> str:
    """Return the check of a block's lines."""
    text = b"".join(line.rstrip() + b"\n" for line in body)
    return hashlib.sha256(text).hexdigest()[:8]


def _fits(check: str, body: Sequence[bytes]) -> bool:
    text = b"".join(body)
    earlier = (text, text.replace(b"\r\n", b"\n"))
    return check == fingerprint(body) or check in (
        hashlib.sha256(form).hexdigest()[:16] for form in earlier
    )


def line_ending(lines: Sequence[bytes]) -> bytes:
    """Return the ending of block lines: that of the first line."""
    return b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"


def code_lines(code: str, indent: bytes, eol: bytes) -> tuple[bytes, ...]:
    """Indent lines of code for a file; blank ones stay without indent."""
    lines = (line.encode() for line in code.removesuffix("\n").split("\n"))
    return tuple((indent + line if line.strip() else b"") + eol for line in lines)


def was_lines(lines: Iterable[bytes], indent: bytes, eol: bytes) -> list[bytes]:
    """Comment out lines that a block displaces."""
    ends = (b"\n", b"\r")
    return [
        indent + WAS + (line if line.endswith(ends) else line + eol) for line in lines
    ]


def make_block(
    name: tuple[str, str],
    lines: Sequence[bytes],
    span: tuple[int, int],
    indent: bytes,
    code: str,
    order: tuple[bool, int] = (False, 0),
) -> Block:
    """Make the block ``(patch, id)`` of ``code`` for ``span`` of the pristine lines."""
    eol = line_ending(lines)
    displaced = lines[slice(*span)]
    body = [*was_lines(displaced, indent, eol), *code_lines(code, indent, eol)]
    begin, end = _sentinels(":".join(name), body)
    if displaced:
        begin += f" was={len(displaced)}"
    text = (indent + begin.encode() + eol, *body, indent + end.encode() + eol)
    return Block(*name, *span, indent, text, order)


def _sentinels(name: str, body: Iterable[bytes]) -> tuple[str, str]:
    check = fingerprint(body)
    return f"# BLOCK_BEGIN {name} {check}", f"# BLOCK_END {name} {check}"


# Patches that are ours in whatever state their blocks are, each with the ids of its
# blocks, None for any id; None for any patch.
Ours = Mapping[str, Collection[str] | None] | None


def parse(text: bytes, file: str = "<text>", ours: Ours = None) -> Parsed:
    """Split ``text`` into pristine lines and blocks.

    Of a whole block that stands there twice, as after a merge that kept both sides, the
    second is dropped. Raises DamagedError, with ``file`` and line number, for half a
    block of ours.
    """
    lines = text.splitlines(keepends=True)
    if MARK not in text:
        return Parsed(tuple(lines), ())
    eol = line_ending(lines)
    open_ended = not lines[-1].endswith((b"\n", b"\r"))
    if open_ended:
        lines[-1] += eol
    marks = _marks(text, lines)
    pristine: list[bytes] = []
    blocks: dict[str, Block] = {}
    halves: list[tuple[int, str, str]] = []
    number = 0
    while number < len(lines):
        begin = _read_begin(marks[number])
        end = _find_end(marks, number, begin, ours) if begin else 0
        if begin and end:
            above, whole, below = _without_foreign(begin, lines[number : end + 1])
            if _is_ours(begin, ours) or _fits(begin.check, whole[1:-1]):
                pristine += above
                block = _read_block(begin, whole, pristine, len(blocks))
                first = blocks.setdefault(block.name, block)
                if first is not block:
                    if not _is_copy(first, block, pristine):
                        raise _damaged(file, number, lines[number], "stands here twice")
                    del pristine[block.at :]
                pristine += below
                number = end + 1
                continue
        elif half := _half_of_ours(marks[number], begin, ours):
            halves.append((number, *half))
        pristine.append(lines[number])
        number += 1
    for number, name, damage in halves:
        # Beside a whole block of that name it is somebody's text.
        if name not in blocks:
            raise _damaged(file, number, lines[number], damage)
    if open_ended and pristine:
        pristine[-1] = pristine[-1].removesuffix(eol)
    return Parsed(tuple(pristine), tuple(blocks.values()))


def _is_copy(first: Block, second: Block, pristine: Sequence[bytes]) -> bool:
    """Return whether both blocks are whole, and displaced the same lines."""
    displaced = [pristine[slice(each.at, each.until)] for each in (first, second)]
    return not (first.edited or second.edited) and displaced[0] == displaced[1]


def _marks(text: bytes, lines: list[bytes]) -> list[bytes]:
    """Return the lines, with those inside of a string empty: they are no comments."""
    marks = [*lines]
    for first, last in _strings(text):
        marks[first:last] = [b""] * (last - first)
    return marks


@functools.lru_cache(maxsize=64)
def _strings(text: bytes) -> tuple[tuple[int, int], ...]:
    """Return the lines [first, last) that begin inside of a string.

    There are none in a text that this Python cannot parse, as with conflict markers.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(
        (node.lineno, node.end_lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant)
        and node.end_lineno
        and node.end_lineno > node.lineno
    )


def _is_ours(begin: _Begin, ours: Ours) -> bool:
    return begin.is_earlier or _has_owner(begin.patch, begin.id, ours)


def _has_owner(patch: str, id_: str, ours: Ours) -> bool:
    if ours is None:
        return True
    known = [ours[name] for name in patch.split("+") if name in ours]
    return any(ids is None or id_ in ids for ids in known)


def _half_of_ours(
    line: bytes, begin: _Begin | None, ours: Ours
) -> tuple[str, str] | None:
    """Return name and damage of a line that is half a block of ours, else None."""
    if begin:
        if not _is_ours(begin, ours):
            return None
        damage = "has no BLOCK_END of its own"
        if begin.id.endswith(ADDED_ID):
            damage = "is that of a whole file, which does not end with it or was moved"
        return f"{begin.patch}:{begin.id}", damage
    end = _END.fullmatch(line)
    if not end or not _has_owner(end[1].decode(), end[2].decode(), ours):
        return None
    return f"{end[1].decode()}:{end[2].decode()}", "has no BLOCK_BEGIN of its own"


def _find_end(marks: list[bytes], at: int, begin: _Begin, ours: Ours) -> int:
    """Find the index of the END line that closes the BEGIN line at ``at``, else 0."""
    if begin.id.endswith(ADDED_ID):
        return 0
    for number in range(at + 1, len(marks)):
        if marks[number].rstrip(b"\r\n") == begin.end:
            return number
        if _half_of_ours(marks[number], _read_begin(marks[number]), ours):
            break
    return 0


def _without_foreign(
    begin: _Begin, text: list[bytes]
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Split off what somebody put between the lines of a block, at most twice.

    That is a block of theirs, from one comment to another. It gets the indent of ours,
    outside of which it then stands, and must have no use for a name of ours.
    """
    first, *body, last = text
    if _fits(begin.check, body):
        return [], text, []
    ends = [n for n, line in enumerate(body) if line.lstrip().startswith(b"#")]
    for bounds in chain(combinations(ends, 2), combinations(ends[:MOST_ENDS], 4)):
        runs = list(zip(bounds[::2], bounds[1::2], strict=True))
        within = {n for start, stop in runs for n in range(start, stop + 1)}
        rest = [line for n, line in enumerate(body) if n not in within]
        if not _fits(begin.check, rest):
            continue
        above: list[bytes] = []
        below: list[bytes] = []
        for start, stop in runs:
            run = _at_indent(body[start : stop + 1], begin.indent)
            if run is None or _names(run) & _bound(rest):
                return [], text, []
            (below if start else above).extend(run)
        return above, [first, *rest, last], below
    return [], text, []


def _at_indent(run: list[bytes], indent: bytes) -> list[bytes] | None:
    """Indent lines as a block is; None if they are less indented."""
    blank = run[0][: len(run[0]) - len(run[0].lstrip())]
    if not blank.startswith(indent):
        return None
    return [indent + line.removeprefix(blank) if line.strip() else line for line in run]


def _names(run: Sequence[bytes]) -> set[str]:
    code = b"".join(line for line in run if not line.lstrip().startswith(b"#"))
    return set(re.findall(r"[^\W\d]\w*", code.decode(errors="replace")))


def _bound(body: Sequence[bytes]) -> set[str]:
    """Return the names that the lines of a block bind."""
    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(b"".join(body).decode()))):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.ExceptHandler(name=name)
                | ast.alias(name=_, asname=str(name))
                | ast.alias(name=name)
                | ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                names.add((name or "").partition(".")[0])
    return names - {""}


def _damaged(file: str, number: int, line: bytes, what: str) -> DamagedError:
    shown = line.strip().decode(errors="replace")
    return DamagedError(
        f"{file}:{number + 1}: {shown!r} {what}; "
        "put the line back, or restore the file from the package"
    )


def _read_block(
    begin: _Begin, text: list[bytes], pristine: list[bytes], order: int
) -> Block:
    """Read a block; the lines that it displaced go back to ``pristine``."""
    body = text[1:-1]
    prefix = begin.indent + WAS
    # Editors strip the blank that ends the line of an empty line.
    kept = [
        line if line.startswith(prefix) else prefix + line[len(prefix) - 1 :]
        for line in body[: begin.displaced]
        if line.startswith(prefix) or line.rstrip() == prefix.rstrip()
    ]
    at = len(pristine)
    pristine += [line[len(prefix) :] for line in kept]
    torn = len(kept) != begin.displaced
    return Block(
        patch=begin.patch,
        id=begin.id,
        at=at,
        until=len(pristine),
        indent=begin.indent,
        text=tuple(text),
        order=(False, order),
        edited=torn or not _fits(begin.check, body),
        torn=torn,
    )


def render(lines: Sequence[bytes], blocks: Iterable[Block]) -> bytes:
    """Put the blocks into the pristine lines, in one canonical order."""
    blocks = sorted(blocks, key=Block.sort_key)
    if not blocks:
        return b"".join(lines)
    lines = list(lines)
    eol = line_ending(lines)
    open_ended = bool(lines) and not lines[-1].endswith((b"\n", b"\r"))
    if open_ended:
        lines[-1] += eol
    out: list[bytes] = []
    position = 0
    for block in blocks:
        out += lines[position : block.at]
        out += block.text
        position = block.until
    text = b"".join(out + lines[position:])
    return text.removesuffix(eol) if open_ended else text


def check_overlaps(blocks: Sequence[Block], file: str) -> None:
    """Raise ConflictError where a block stands inside lines that another replaces."""
    for replace in (block for block in blocks if block.until > block.at):
        for other in blocks:
            if other is not replace and _overlaps(replace, other):
                raise ConflictError(
                    f"{file}: block {other.name} lies in the lines that block "
                    f"{replace.name} replaces; only one of the two can be applied"
                )


def _overlaps(replace: Block, other: Block) -> bool:
    if other.until > other.at:
        return replace.at < other.until and other.at < replace.until
    if replace.at < other.at < replace.until:
        return True
    # After the last statement *inside* what is replaced: same line, deeper indent.
    return other.at == replace.until and len(other.indent) > len(replace.indent)


def parse_added(text: bytes, file: str, ours: Ours = None) -> Added | None:
    """Parse an added file; None if ``text`` is an ordinary file, or is not whole."""
    lines = text.splitlines(keepends=True)
    begin = _read_begin(lines[0]) if lines else None
    if not begin or begin.id != file or not file.endswith(ADDED_ID):
        return None
    body = lines[1:-1]
    if lines[-1].rstrip(b"\r\n") != begin.end:
        return None
    edited = not _fits(begin.check, body)
    if edited and not _is_ours(begin, ours):
        return None
    return Added(
        path=file,
        owners=tuple(begin.patch.split("+")),
        content=b"".join(body).replace(b"\r\n", b"\n"),
        edited=edited,
    )


def read(text: bytes, file: str, ours: Ours = None) -> Parsed | Added:
    """Parse a file of either kind. Raises DamagedError."""
    return parse_added(text, file, ours) or parse(text, file, ours)


def render_added(added: Added) -> bytes:
    name = f"{'+'.join(added.owners)}:{added.path}"
    begin, end = _sentinels(name, added.content.splitlines())
    return f"{begin}\n".encode() + added.content + f"{end}\n".encode()
