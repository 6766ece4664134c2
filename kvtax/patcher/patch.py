# SPDX-License-Identifier: Apache-2.0
"""A patch: its blocks, files, releases, parameters and relations to others."""

import ast
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ManifestError, ParameterError

# A build that knows no tag: a checkout of the development branch, newer than all.
_UNRELEASED = re.compile(r"(?!v?\d)|0\.(0|1\.dev)")
_PLACEHOLDER = re.compile(r"@([A-Za-z_]\w*)@")


class Place(NamedTuple):
    """A statement that must be in the tree."""

    file: str
    scope: str
    anchor: str


@dataclass(frozen=True)
class BlockSpec:
    """One block of a manifest; ``order`` is its place there.

    ``optional`` names the blocks that are left out together where one does not fit;
    ``given`` is a statement without which the block does not fit.
    """

    id: str
    order: int
    file: str
    scope: str
    anchor: str
    where: str
    code: str
    optional: str | None = None
    given: Place | None = None


class Relation(NamedTuple):
    """A manifest's statement about another patch.

    ``kind``: ``uses`` (this patch can do more where ``other`` is applied) or
    ``conflicts`` (the two are refused in one tree). ``why`` is the reason.
    """

    kind: str
    other: str
    why: str


class Only(NamedTuple):
    """A name that the package must use, or with ``methods`` change, nowhere else.

    ``uses``: how often at most, by ``file:scope``; uses.py says more.
    """

    name: str
    why: str
    uses: Mapping[str, int]
    within: str = ""
    methods: Sequence[str] | None = None


class Release(NamedTuple):
    """A tested release of a package.

    ``lock``: what an environment of the release holds, a path from the repository's
    root; None for a vLLM release without a CPU build. ``sdist_sha256``: hash of its
    source release, where that is fetched.
    """

    version: str
    lock: str | None = None
    sdist_sha256: str | None = None


@dataclass(frozen=True)
class Patch:
    """A checked patch folder. ``files`` maps added paths to their content.

    Releases before ``since``, or from ``before_version`` on, need no such patch.
    Earlier patches that it ``replaces`` come out of a tree with it, and for it.
    """

    name: str
    package: str
    summary: str
    since: str | None
    before_version: str | None
    relations: tuple[Relation, ...]
    parameters: Mapping[str, Any]
    files: Mapping[str, bytes]
    blocks: tuple[BlockSpec, ...]
    sha256: str
    replaces: tuple[str, ...] = ()
    only: tuple[Only, ...] = ()

    def tested(self, releases: Mapping[str, list[Release]]) -> tuple[str, ...]:
        """List the releases of its package that the patch is for: those are tested."""
        versions = (release.version for release in releases.get(self.package, ()))
        return tuple(filter(self.is_needed, versions))

    def is_needed(self, version: str | None) -> bool:
        """Return whether a package of that release lacks what the patch does."""
        return _in_range(version, self.since, self.before_version)


def patch_hash(patch: Patch) -> str:
    """Return the SHA-256 (64 hex digits) of the manifest and the added files."""
    return patch.sha256


def load_releases(path: Path | str) -> dict[str, list[Release]]:
    """Read configs/releases.toml: tested releases by package. Raises ManifestError."""
    try:
        tables = tomllib.loads(Path(path).read_text())
        return {
            package: [Release(**entry) for entry in entries]
            for package, entries in tables.items()
        }
    except (OSError, ValueError, TypeError) as error:
        raise ManifestError(f"{path}: {error}") from None


def release_numbers(version: str) -> tuple[int, ...]:
    """Split a version into numbers; rc, dev and local builds count as their release."""
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
    if _UNRELEASED.match(version):
        return before is None
    numbers = release_numbers(version)
    return (since is None or release_numbers(since) <= numbers) and (
        before is None or numbers < release_numbers(before)
    )


def fill(code: str, values: Mapping[str, Any]) -> str:
    """Put the ``repr`` of a parameter's value where the code has ``@NAME@``."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ManifestError(f"{match[0]} is not among the [parameters]")
        return repr(values[match[1]])

    return _PLACEHOLDER.sub(value, code)


def resolve_parameters(
    declared: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Return values by patch name: the ``declared`` defaults, with ``given`` over them.

    Raises ParameterError for a name no patch declares, or a value that is not a plain
    Python literal.
    """
    given = dict(given or {})
    known = {name for defaults in declared.values() for name in defaults}
    for name, value in given.items():
        if name not in known:
            raise ParameterError(
                f"parameter {name!r} is not known to these patches; "
                f"known are {sorted(known) or 'none'}"
            )
        try:
            literal = ast.literal_eval(repr(value)) == value
        except (SyntaxError, ValueError):
            literal = False
        if not literal:
            raise ParameterError(f"parameter {name}: {value!r} is not a plain literal")
    return {
        patch: {name: given.get(name, default) for name, default in defaults.items()}
        for patch, defaults in declared.items()
    }
