# SPDX-License-Identifier: Apache-2.0
"""Reader of ``patches/<name>/patch.toml``; checks every field before use.

``[[file]]`` adds a file, ``[[block]]`` puts lines at an anchor (patches/README.md).
Blocks of one id are forms of it, of which exactly one fits a tree (choice.py).
"""

import ast
import difflib
import hashlib
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from .anchors import parse_anchor, parse_quietly
from .blocks import ADDED_ID, MARK, code_lines
from .errors import ManifestError
from .patch import BlockSpec, Only, Patch, Place, Relation, fill, release_numbers

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_PATH = re.compile(r"[A-Za-z0-9_./-]+\.py")
_REQUIRED_KEYS = {"name", "package", "summary"}
_RELATIONS = ("uses", "conflicts")
_OPTIONAL_KEYS = {"since", "before_version", "replaces"}
_TABLES = {"parameters", "file", "block", "only"}
_MANIFEST_KEYS = {*_REQUIRED_KEYS, *_RELATIONS, *_OPTIONAL_KEYS, *_TABLES}
_AROUND_KEYS = {"id", "where", "before", "after"}
_BLOCK_KEYS = {"id", "file", "scope", "anchor", "where", "code"}


def load_patches(folder: Path | str) -> dict[str, Patch]:
    """Load all patches under ``folder``, by name. Raises ManifestError."""
    manifests = sorted(Path(folder).glob("*/patch.toml"))
    patches = {path.parent.name: load_patch(path.parent) for path in manifests}
    for patch in patches.values():
        for relation in patch.relations:
            _check_relation(patch, relation, patches)
    return patches


def load_sets(folder: Path | str) -> dict[str, list[str]]:
    """Read the sets in ``sets.toml`` of ``folder``: names of patches, by name of set.

    A set may name sets above it. Empty without a file.
    """
    path = Path(folder) / "sets.toml"
    sets: dict[str, list[str]] = {}
    for name, members in (
        _read_toml(path, path.read_bytes()) if path.exists() else {}
    ).items():
        sets[name] = in_sets(members, sets)
    return sets


def in_sets(names: Iterable[str], sets: Mapping[str, list[str]]) -> list[str]:
    """Put the patches of a set in place of its name; each patch once."""
    patches = (patch for name in names for patch in sets.get(name, [name]))
    return list(dict.fromkeys(patches))


def select(known: Mapping[str, Patch], names: Iterable[str]) -> list[Patch]:
    """Return the patches of these names. Raises ManifestError if there is none."""
    for name in names:
        if name not in known:
            raise ManifestError(
                f"no patch or set {name!r}{nearest(name, known)}; there are "
                f"{', '.join(sorted(known)) or 'no patches'}"
            )
    return [known[name] for name in names]


def nearest(word: str, words: Iterable[str]) -> str:
    """Ask whether `word` was to be the one of `words` that it resembles; else ""."""
    near = difflib.get_close_matches(word, [*words], 1)
    return f" (did you mean {near[0]}?)" if near else ""


def load_patch(folder: Path | str) -> Patch:
    """Load the patch in ``folder``. Raises ManifestError with file and field."""
    path = Path(folder) / "patch.toml"
    if not path.is_file():
        raise ManifestError(f"{path}: no such manifest")
    raw = path.read_bytes()
    data = _read_toml(path, raw)
    try:
        return _build(path, raw, data)
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from None


def _read_toml(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(raw.decode())
    except RecursionError:
        raise ManifestError(f"{path}: is nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: {error}") from None


def _build(path: Path, raw: bytes, data: dict[str, Any]) -> Patch:
    _check_keys(data, _REQUIRED_KEYS, _MANIFEST_KEYS)
    name = _name(data["name"])
    if name != path.parent.name:
        raise ManifestError(f"name {name!r} must equal its folder {path.parent.name!r}")
    since, before_version = (data.get(key) for key in ("since", "before_version"))
    for bound in (since, before_version):
        if bound is not None and not isinstance(bound, str):
            raise ManifestError(f"{bound!r} must be a string, such as '0.18.1'")
        if bound is not None:
            release_numbers(bound)
    parameters = data.get("parameters", {})
    if not isinstance(parameters, dict):
        raise ManifestError("parameters must be a table: [parameters]")
    entries = [half for entry in _tables(data, "block") for half in _halves(entry)]
    blocks = tuple(_block(e, order, parameters) for order, e in enumerate(entries))
    files = dict(_added_file(path.parent, entry) for entry in _tables(data, "file"))
    if not blocks and not files:
        raise ManifestError("the patch has neither a block nor a file")
    _check_forms(blocks)
    for block in blocks:
        if block.file in files:
            raise ManifestError(f"block {block.id!r} is in a file that the patch adds")
    digest = hashlib.sha256(raw)
    for added in sorted(files):
        digest.update(f"\0{added}\0{len(files[added])}\0".encode() + files[added])
    return Patch(
        name=name,
        package=_name(data["package"]),
        summary=str(data["summary"]),
        since=since,
        before_version=before_version,
        relations=tuple(r for kind in _RELATIONS for r in _relations(data, kind)),
        parameters=parameters,
        files=files,
        blocks=blocks,
        sha256=digest.hexdigest(),
        replaces=_replaces(data),
        only=tuple(map(_only, _tables(data, "only"))),
    )


def _replaces(data: dict[str, Any]) -> tuple[str, ...]:
    names = data.get("replaces", [])
    if not isinstance(names, list):
        raise ManifestError("replaces must be a list of names")
    return tuple(map(_name, names))


def _only(entry: dict[str, Any]) -> Only:
    _check_keys(entry, {"name", "why", "uses"}, set(Only._fields))
    if not isinstance(entry["uses"], dict):
        raise ManifestError("uses of only must be a table: how often, by file:scope")
    return Only(**entry)


def _check_keys(data: dict[str, Any], required: set[str], known: set[str]) -> None:
    for key in sorted(required - data.keys()):
        raise ManifestError(f"{key!r} is missing")
    for key in sorted(data.keys() - known):
        raise ManifestError(f"{key!r} is not known; known are {sorted(known)}")


def _tables(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    entries = data.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ManifestError(f"{key} must be a list of tables: [[{key}]]")
    return entries


def _relations(data: dict[str, Any], kind: str) -> list[Relation]:
    table = data.get(kind, {})
    if not isinstance(table, dict) or not all(
        isinstance(why, str) and why for why in table.values()
    ):
        raise ManifestError(f"{kind} must be a table of patch names and reasons")
    return [Relation(kind, other, why) for other, why in table.items()]


def _check_relation(
    patch: Patch, relation: Relation, patches: Mapping[str, Patch]
) -> None:
    """Refuse a relation to no patch of the folder, and a conflict known to one only.

    Either manifest alone is then enough to refuse the two together.
    """
    place = f"{patch.name}/patch.toml: {relation.kind}.{relation.other}"
    other = patches.get(relation.other)
    if other is None or other is patch:
        raise ManifestError(f"{place} does not name another patch of this folder")
    back = {known.other for known in other.relations if known.kind == "conflicts"}
    if relation.kind == "conflicts" and patch.name not in back:
        raise ManifestError(
            f"{place}: a conflict stands in both manifests, and "
            f"{other.name}/patch.toml does not have it"
        )


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ManifestError(f"{value!r} is not a name (letters, digits, '_', '.', '-')")
    return value


def _path(value: object) -> str:
    text = str(value)
    parts = PurePosixPath(text).parts
    if not _PATH.fullmatch(text) or text.startswith("/") or ".." in parts:
        raise ManifestError(f"{text!r} is not a .py path inside the package")
    return str(PurePosixPath(text))


def _added_file(folder: Path, entry: dict[str, Any]) -> tuple[str, bytes]:
    _check_keys(entry, {"path", "source"}, {"path", "source"})
    source = folder / str(entry["source"])
    try:
        content = source.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"file source {entry['source']!r}: {error}") from None
    if b"\r" in content or (content and not content.endswith(b"\n")) or MARK in content:
        raise ManifestError(
            f"file source {entry['source']!r}: needs Unix line endings, a newline at "
            "its end, and no sentinel of its own"
        )
    return _path(entry["path"]), content


def _halves(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a block ``around`` its anchor: <id>_begin before it, <id>_end after it."""
    if entry.get("where") != "around":
        return [entry]
    rest = {key: entry[key] for key in entry if key not in _AROUND_KEYS}
    try:
        _check_keys(entry, _AROUND_KEYS, _AROUND_KEYS | rest.keys())
    except ManifestError as error:
        raise ManifestError(f"block {entry.get('id')!r}: {error}") from None
    if "code" in rest:
        raise ManifestError(
            f"block {entry['id']!r}: around has before and after, no code"
        )
    name = _name(entry["id"])
    return [
        rest | {"id": f"{name}_begin", "where": "before", "code": entry["before"]},
        rest | {"id": f"{name}_end", "where": "after", "code": entry["after"]},
    ]


def _block(
    entry: dict[str, Any], order: int, parameters: Mapping[str, Any]
) -> BlockSpec:
    _check_keys(entry, _BLOCK_KEYS, _BLOCK_KEYS | {"optional", "given"})
    try:
        strings = {key: value for key, value in entry.items() if key != "given"}
        if not all(isinstance(value, str) for value in strings.values()):
            raise ManifestError("every field must be a string")
        code = textwrap.dedent(entry["code"]).strip("\n") + "\n"
        spec = BlockSpec(
            id=_name(entry["id"]),
            order=order,
            file=_path(entry["file"]),
            scope=entry["scope"],
            anchor=entry["anchor"],
            where=entry["where"],
            code=code,
            optional=_name(entry["optional"]) if "optional" in entry else None,
            given=_given(entry),
        )
        if spec.where not in ("before", "after", "replace"):
            raise ManifestError(
                f"where is {spec.where!r}, not before, after, replace, around"
            )
        if spec.id.endswith(ADDED_ID):
            raise ManifestError(f"an id does not end in {ADDED_ID}")
        parse_anchor(spec.anchor)
        _check_code(fill(code, parameters))
    except ManifestError as error:
        raise ManifestError(f"block {entry['id']!r}: {error}") from None
    return spec


def _given(entry: dict[str, Any]) -> Place | None:
    if "given" not in entry:
        return None
    given, keys = entry["given"], set(Place._fields)
    if not isinstance(given, dict):
        raise ManifestError("given must be a table: file, scope, anchor")
    place = {key: entry[key] for key in ("file", "scope")} | given
    _check_keys(place, keys, keys)
    if not all(isinstance(value, str) for value in place.values()):
        raise ManifestError("every field of given must be a string")
    parse_anchor(place["anchor"])
    return Place(_path(place["file"]), place["scope"], place["anchor"])


def _check_code(code: str) -> None:
    """Refuse code that does not parse by itself, or whose meaning an indent changes."""
    if "\r" in code or MARK.decode() in code:
        raise ManifestError("code needs Unix line endings and no sentinel of its own")
    if not code.strip():
        raise ManifestError("code is empty")
    try:
        plain = parse_quietly(code).body
        lines = (b"if 1:\n", b"    pass\n", *code_lines(code, b"    ", b"\n"))
        (wrapper,) = parse_quietly(b"".join(lines)).body
    except (SyntaxError, ValueError) as error:
        raise ManifestError(f"code is not valid Python: {error}") from None
    assert isinstance(wrapper, ast.If)
    if _meaning(plain) != _meaning(wrapper.body[1:]):
        raise ManifestError(
            "a string over several lines would change when the code is indented; "
            "put it into an added file"
        )


def _meaning(statements: list[ast.stmt]) -> list[str]:
    for node in (n for statement in statements for n in ast.walk(statement)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None  # a docstring may be indented
    return [ast.dump(statement) for statement in statements]


def _check_forms(blocks: Iterable[BlockSpec]) -> None:
    seen: dict[str, list[BlockSpec]] = {}
    for block in blocks:
        for other in seen.setdefault(block.id, []):
            if block.optional != other.optional:
                raise ManifestError(f"forms of block {block.id!r} differ in 'optional'")
            if _where(block) == _where(other):
                raise ManifestError(
                    f"block {block.id!r} has two forms for the same code; give them "
                    "different anchors, or a statement that is 'given' for one only"
                )
        seen[block.id].append(block)


def _where(block: BlockSpec) -> tuple[object, ...]:
    return block.file, block.scope, block.anchor.strip(), block.given
