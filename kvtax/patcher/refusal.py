# SPDX-License-Identifier: Apache-2.0
"""Refusals of edited blocks, with the edits as a diff."""

import difflib
from collections.abc import Iterable, Mapping

from .blocks import WAS, Added, Block, Parsed, code_lines, fingerprint, line_ending
from .errors import DamagedError
from .patch import Patch, fill

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
    diff = _diff(ours, [*was, *block.code], title, path)
    return DamagedError(f"{what}; put its lines back, {_OUT}:\n{diff}")


def edited_file(added: Added, known: Mapping[str, Patch]) -> DamagedError:
    """Return the refusal of an edited file that patches added."""
    owners = "+".join(added.owners)
    files = (known[name].files for name in added.owners if name in known)
    ours = next((own[added.path] for own in files if added.path in own), b"")
    lines = ours.splitlines(keepends=True), added.content.splitlines(keepends=True)
    diff = _diff(*lines, f"in patch {owners}", added.path)
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


def _diff(ours: Iterable[bytes], now: Iterable[bytes], title: str, path: str) -> str:
    old, new = (
        [line.decode(errors="replace").rstrip("\r\n") for line in lines]
        for lines in (ours, now)
    )
    return "\n".join(difflib.unified_diff(old, new, title, f"{path} now", lineterm=""))
