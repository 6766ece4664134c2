# SPDX-License-Identifier: Apache-2.0
"""A patch: its blocks and files, the releases it is for, what it says about others."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import ManifestError


@dataclass(frozen=True)
class BlockSpec:
    """One block of a manifest; ``order`` is its place there."""

    id: str
    order: int
    file: str
    scope: str
    anchor: str
    where: str
    code: str
    since: str | None
    before_version: str | None

    def active(self, version: str | None) -> bool:
        """Whether the block is for that release; ranges need a known version."""
        return _in_range(version, self.since, self.before_version)

    @property
    def ranged(self) -> bool:
        return self.since is not None or self.before_version is not None


class Relation(NamedTuple):
    """What a manifest says about another patch.

    ``kind``: ``alters`` (with this patch applied, ``other`` does something else or
    more), ``uses`` (this patch can do more where ``other`` is applied), ``conflicts``
    (the two are refused in one tree). ``why`` says it for a reader.
    """

    kind: str
    other: str
    why: str


@dataclass(frozen=True)
class Patch:
    """A checked patch folder. ``files`` maps added paths to their content.

    Releases before ``since``, or from ``before_version`` on, need no such patch.
    """

    name: str
    package: str
    summary: str
    tested: tuple[str, ...]
    since: str | None
    before_version: str | None
    relations: tuple[Relation, ...]
    parameters: Mapping[str, Any]
    files: Mapping[str, bytes]
    blocks: tuple[BlockSpec, ...]
    sha256: str

    def is_tested(self, version: str | None) -> bool:
        """Whether ``version`` (its local ``+suffix`` apart) is among ``tested``."""
        return version is not None and version.partition("+")[0] in self.tested

    def is_needed(self, version: str | None) -> bool:
        """Whether a package of that release lacks what the patch does."""
        return _in_range(version, self.since, self.before_version)

    @property
    def ranged(self) -> bool:
        blocks = any(block.ranged for block in self.blocks)
        return blocks or bool(self.since or self.before_version)


def patch_hash(patch: Patch) -> str:
    """SHA-256 (64 hex digits) over the manifest and the added files' sources."""
    return patch.sha256


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version; rc, dev and local builds count as their release."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if not match:
        raise ManifestError(f"{version!r} is not a version like 0.18.1")
    numbers = [int(part) for part in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _in_range(version: str | None, since: str | None, before: str | None) -> bool:
    if version is None:
        return True
    found = release(version)
    return (since is None or release(since) <= found) and (
        before is None or found < release(before)
    )
