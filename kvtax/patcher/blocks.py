# SPDX-License-Identifier: Apache-2.0
"""A patched file is pristine lines plus blocks; ``parse`` and ``render`` are inverses.

All text is bytes, so lines of others come back byte for byte. A block:

    # BLOCK_BEGIN <patch>:<id> sha256:<16 hex digits> <where> order=<n> [displaced=<n>]
        [named]                                           (all of that on one line)
    # WAS: <a line that a replace displaced, ending included>
    <the block's own lines>
    # BLOCK_END <patch>:<id>

The hash is over the lines between the two sentinels, whatever their line ends.
``order`` is the block's place in
its manifest, so that a file can be rendered again without any manifest. ``named``: the
patch was applied by its name, so what a set applied is not all of it. An added file
is one block around the whole file:

    # BLOCK_BEGIN <patch>[+<patch>...]:<path> sha256:<...> new-file dirs=<n>
        [named=<patch>[+<patch>...]]

where ``dirs`` counts the innermost parent directories that patches created.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .errors import ConflictError, DamagedError

WAS = b"# WAS: "
MARK = b"# BLOCK_"
SENTINEL = re.compile(rb"[ \t\f]*# BLOCK_(BEGIN|END)\b")
_HEAD = rb"([ \t]*)# BLOCK_BEGIN ([\w.+-]+):([\w./-]+) sha256:([0-9a-f]{16}) "
_BEGIN = re.compile(
    _HEAD + rb"(before|after|replace) order=(\d+)(?: displaced=(\d+))?( named)?\r?\n"
)
_BEGIN_ADDED = re.compile(_HEAD + rb"new-file dirs=(\d+)(?: named=([\w.+-]+))?\r?\n")
_NAMES = re.compile(rb"# BLOCK_(?:BEGIN|END) ([\w.+-]+):")
_RANK = {"after": 0, "before": 1, "replace": 2}


@dataclass(frozen=True)
class Block:
    """One block. It stands before pristine line ``at`` and displaces ``[at, until)``.

    ``code`` holds its lines as they are in the file: indented, endings included.
    ``edited`` is set by ``parse`` where the lines no longer fit their hash, to that
    hash, and ``torn`` where not all displaced lines are there.
    """

    patch: str
    id: str
    where: str
    order: int
    at: int
    until: int
    indent: bytes
    code: tuple[bytes, ...]
    named: bool = False
    edited: str = field(default="", compare=False)
    torn: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.patch}:{self.id}"

    def sort_key(self) -> tuple[int, int, int, str, int]:
        """Order after-blocks of the statement above first, innermost first."""
        inner_first = -len(self.indent)
        return self.at, _RANK[self.where], inner_first, self.patch, self.order


class Parsed(NamedTuple):
    lines: tuple[bytes, ...]
    blocks: tuple[Block, ...]


class Unreadable(NamedTuple):
    """A file with half a sentinel, or a foreign one: why, and the patches it names."""

    why: str
    patches: frozenset[str]


@dataclass(frozen=True)
class Added:
    """A whole file that patches added; ``owners`` and ``named`` are sorted."""

    path: str
    owners: tuple[str, ...]
    dirs: int
    content: bytes
    named: tuple[str, ...] = ()
    edited: bool = field(default=False, compare=False)


def fingerprint(body: Iterable[bytes]) -> str:
    text = b"".join(body).replace(b"\r\n", b"\n")
    return hashlib.sha256(text).hexdigest()[:16]


def line_ending(lines: Sequence[bytes]) -> bytes:
    """Return the ending of block lines: that of the first line."""
    return b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"


def code_lines(code: str, indent: bytes, eol: bytes) -> tuple[bytes, ...]:
    """Indent lines of code for a file; blank ones stay without indent."""
    lines = (line.encode() for line in code.removesuffix("\n").split("\n"))
    return tuple((indent + line if line.strip() else b"") + eol for line in lines)


def parse(text: bytes, file: str = "<text>") -> Parsed:
    """Split ``text`` into pristine lines and blocks.

    Raises DamagedError, with ``file`` and line number, for half a sentinel, nested
    blocks, or text that ``render`` would not give back.
    """
    lines = text.splitlines(keepends=True)
    if MARK not in text:
        return Parsed(tuple(lines), ())
    eol = line_ending(lines)
    open_ended = not lines[-1].endswith((b"\n", b"\r"))
    if open_ended:
        lines[-1] += eol
    pristine: list[bytes] = []
    blocks: list[Block] = []
    number = 0
    while number < len(lines):
        if SENTINEL.match(lines[number]):
            end = _find_end(lines, number, file)
            block = _parse_block(lines, number, end, pristine)
            if any(block.name == other.name for other in blocks):
                raise _damaged(file, number, lines[number], "stands here twice")
            blocks.append(block)
            number = end + 1
        else:
            pristine.append(lines[number])
            number += 1
    if open_ended and pristine:
        pristine[-1] = pristine[-1].removesuffix(eol)
    parsed = Parsed(tuple(pristine), tuple(blocks))
    if not any(block.edited for block in blocks) and render(*parsed) != text:
        raise DamagedError(
            f"{file}: its blocks are not where or in the order the engine put them; "
            "restore the file from the package and apply again"
        )
    return parsed


def _find_end(lines: list[bytes], begin: int, file: str) -> int:
    """Find the index of the END line that closes the BEGIN line at ``begin``."""
    match = _BEGIN.fullmatch(lines[begin])
    if not match:
        raise _damaged(file, begin, lines[begin], "is not a whole BLOCK_BEGIN line")
    for number in range(begin + 1, len(lines)):
        if SENTINEL.match(lines[number]):
            wanted = match[1] + b"# BLOCK_END " + match[2] + b":" + match[3]
            if lines[number].rstrip(b"\r\n") == wanted:
                return number
            break
    raise _damaged(file, begin, lines[begin], "has no BLOCK_END of its own")


def _damaged(file: str, number: int, line: bytes, what: str) -> DamagedError:
    shown = line.strip().decode(errors="replace")
    return DamagedError(
        f"{file}:{number + 1}: {shown!r} {what}; "
        "put the line back, or restore the file from the package"
    )


def _parse_block(
    lines: list[bytes], begin: int, end: int, pristine: list[bytes]
) -> Block:
    """Parse a block; the lines that it displaced go back to ``pristine``."""
    match = _BEGIN.fullmatch(lines[begin])
    assert match
    indent, patch, id_, digest, where, order, displaced, named = match.groups()
    body = lines[begin + 1 : end]
    count = int(displaced or 0)
    prefix = indent + WAS
    # Editors strip the blank that ends the line of an empty line.
    kept = [
        line if line.startswith(prefix) else prefix + line[len(prefix) - 1 :]
        for line in body[:count]
        if line.startswith(prefix) or line.rstrip() == prefix.rstrip()
    ]
    at = len(pristine)
    pristine += [line[len(prefix) :] for line in kept]
    torn = len(kept) != count
    edited = torn or fingerprint(body) != digest.decode()
    return Block(
        patch=patch.decode(),
        id=id_.decode(),
        where=where.decode(),
        order=int(order),
        at=at,
        until=len(pristine),
        indent=indent,
        code=tuple(body[count:]),
        named=named is not None,
        edited=digest.decode() if edited else "",
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
        out += _render_block(block, lines[block.at : block.until], eol)
        position = block.until
    text = b"".join(out + lines[position:])
    return text.removesuffix(eol) if open_ended else text


def _render_block(block: Block, displaced: list[bytes], eol: bytes) -> list[bytes]:
    body = [block.indent + WAS + line for line in displaced] + list(block.code)
    digest = block.edited or fingerprint(body)
    begin = f"# BLOCK_BEGIN {block.name} sha256:{digest} {block.where}"
    begin += f" order={block.order}"
    if displaced:
        begin += f" displaced={len(displaced)}"
    if block.named:
        begin += " named"
    end = f"# BLOCK_END {block.name}"
    return [
        block.indent + begin.encode() + eol,
        *body,
        block.indent + end.encode() + eol,
    ]


def check_overlaps(blocks: Sequence[Block], file: str) -> None:
    """Raise ConflictError where a block stands inside lines that another replaces."""
    for replace in (block for block in blocks if block.where == "replace"):
        for other in blocks:
            if other is not replace and _overlaps(replace, other):
                raise ConflictError(
                    f"{file}: block {other.name} lies in the lines that block "
                    f"{replace.name} replaces; only one of the two can be applied"
                )


def _overlaps(replace: Block, other: Block) -> bool:
    if other.where == "replace":
        return replace.at < other.until and other.at < replace.until
    if replace.at < other.at < replace.until:
        return True
    # After the last statement *inside* what is replaced: same line, deeper indent.
    at_end = other.at == replace.until and other.where == "after"
    return at_end and len(other.indent) > len(replace.indent)


def parse_added(text: bytes, file: str) -> Added | None:
    """Parse an added file; None if ``text`` is an ordinary file.

    Raises DamagedError if anything stands outside its sentinels, or it was moved.
    """
    lines = text.splitlines(keepends=True)
    match = _BEGIN_ADDED.fullmatch(lines[0]) if lines else None
    if not match:
        return None
    _, owners, path, digest, dirs, named = match.groups()
    inner = [n for n, line in enumerate(lines[1:], 1) if SENTINEL.match(line)]
    end = b"# BLOCK_END " + owners + b":" + path + b"\n"
    if inner != [len(lines) - 1] or lines[-1].replace(b"\r\n", b"\n") != end:
        raise _damaged(file, 0, lines[0], "does not enclose the file as it was added")
    if path.decode() != file or int(dirs) > file.count("/"):
        raise _damaged(file, 0, lines[0], "names another path: the file was moved")
    body = lines[1:-1]
    return Added(
        path=file,
        owners=tuple(owners.decode().split("+")),
        dirs=int(dirs),
        content=b"".join(body).replace(b"\r\n", b"\n"),
        named=tuple(named.decode().split("+")) if named else (),
        edited=fingerprint(body) != digest.decode(),
    )


def read(text: bytes, file: str) -> Parsed | Added | Unreadable:
    """Parse a file of either kind, or one that neither is."""
    try:
        return parse_added(text, file) or parse(text, file)
    except DamagedError as error:
        names = (match[1].decode().split("+") for match in _NAMES.finditer(text))
        return Unreadable(str(error), frozenset().union(*names))


def render_added(added: Added) -> bytes:
    name = f"{'+'.join(added.owners)}:{added.path}"
    begin = f"# BLOCK_BEGIN {name} sha256:{fingerprint([added.content])}"
    begin += f" new-file dirs={added.dirs}"
    if added.named:
        begin += f" named={'+'.join(added.named)}"
    return f"{begin}\n".encode() + added.content + f"# BLOCK_END {name}\n".encode()
