# SPDX-License-Identifier: Apache-2.0
"""Search for an anchor statement in the syntax tree of a pristine file.

Comparison is by syntax tree, so comments, whitespace and quote style do not count. A
compound statement that is given by its header alone is compared without its body, one
with a body as a whole. Several statements that follow each other can be an anchor, too.
"""

import ast
import io
import textwrap
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .errors import AnchorError, ManifestError, TargetError

BOM = b"\xef\xbb\xbf"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BODIES = {"body", "orelse", "handlers", "finalbody", "cases", "decorator_list"}
_STAND_IN_BODIES = (
    "\n    pass",
    "\n    pass\nfinally:\n    pass",
    "\n    case _:\n        pass",
)


class Statement(NamedTuple):
    """Lines ``[start, end)`` of an anchor, decorators included."""

    start: int
    end: int
    indent: bytes


def parse_quietly(text: str | bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def parse_anchor(text: str) -> tuple[list[ast.stmt], bool]:
    """Parse an anchor: whole statements (True), or one header (False).

    Raises ManifestError.
    """
    source = textwrap.dedent(text).strip()
    for number, body in enumerate(("", *_STAND_IN_BODIES)):
        try:
            statements = parse_quietly(source + body).body
        except (SyntaxError, ValueError):
            continue
        if not statements or (number > 0 and len(statements) > 1):
            break
        return statements, number == 0
    raise ManifestError(f"anchor {text!r} is no Python statement or header")


class Source:
    """One pristine file, parsed once, in which anchors are looked up."""

    def __init__(self, lines: Sequence[bytes], file: str):
        self.lines = lines
        self.file = file
        text = b"".join(lines)
        try:
            self.encoding = tokenize.detect_encoding(io.BytesIO(text).readline)[0]
            self.tree = parse_quietly(text)
        except (SyntaxError, ValueError) as error:
            raise TargetError(
                f"{file}: without blocks it is not valid for this Python ({error}); "
                "use the Python the package is installed for, or reinstall the package"
            ) from None

    def find(self, scope: str, anchor: str) -> Statement:
        """Find the only place in ``scope`` that equals ``anchor``.

        Raises AnchorError if there is none or more than one, or if it shares a line.
        """
        scopes = self._scopes(scope)
        wanted, whole = parse_anchor(anchor)
        matches = [
            run
            for owner in scopes
            for run in _runs(owner, len(wanted))
            if all(self._equals(*pair, whole) for pair in zip(run, wanted, strict=True))
        ]
        if len(matches) != 1:
            lines = ", ".join(
                str(line) for line in sorted(m[0].lineno for m in matches)
            )
            raise AnchorError(
                f"{self.file}: anchor {anchor.strip()!r} in scope {scope or 'module'!r}"
                f" matches {len(matches)} statements"
                + (f" (lines {lines})" if matches else "")
                + ", exactly one is needed"
            )
        places = [self._statement(node) for node in matches[0]]
        return Statement(places[0].start, places[-1].end, places[0].indent)

    def _equals(self, node: ast.stmt, wanted: ast.stmt, whole: bool) -> bool:
        if type(node) is not type(wanted) or self._is_elif(node):
            return False
        if whole:
            return ast.dump(node) == ast.dump(wanted)
        decorated = bool(getattr(wanted, "decorator_list", None))
        return _header(node, decorated) == _header(wanted, decorated)

    def _scopes(self, scope: str) -> list[ast.AST]:
        """Find all definitions with that path (a property has several of one name)."""
        owners: list[ast.AST] = [self.tree]
        for name in filter(None, scope.split(".")):
            owners = [
                node
                for owner in owners
                for (node,) in _runs(owner, 1)
                if isinstance(node, DEFINITIONS) and node.name == name
            ]
            if not owners:
                raise AnchorError(
                    f"{self.file}: scope {scope!r} not found (no {name!r} there)"
                )
        return owners

    def _is_elif(self, node: ast.stmt) -> bool:
        line = self.lines[node.lineno - 1].lstrip()
        return isinstance(node, ast.If) and line.startswith(b"elif")

    def _statement(self, node: ast.stmt) -> Statement:
        decorators = getattr(node, "decorator_list", [])
        start = min([node.lineno, *(item.lineno for item in decorators)]) - 1
        end = node.end_lineno or node.lineno
        first = self.lines[start].removeprefix(BOM)
        blank = first[: len(first) - len(first.lstrip(b" \t\f"))]
        # Offsets in the syntax tree count bytes of UTF-8, whatever the file's encoding.
        last = self.lines[end - 1].decode(self.encoding).encode()
        tail = last[node.end_col_offset :].strip()
        own_start = decorators or len(blank) == node.col_offset
        if not own_start or (tail and not tail.startswith(b"#")):
            raise AnchorError(
                f"{self.file}:{start + 1}: the anchor shares a line with other code; "
                "choose a statement that stands on lines of its own"
            )
        # A form feed sets the column back to zero.
        return Statement(start, end, blank.rpartition(b"\f")[2])


def _runs(owner: ast.AST, length: int) -> Iterator[list[ast.stmt]]:
    """Yield each run of ``length`` statements, at any depth.

    Nested functions and classes are not entered.
    """
    for _, nodes in ast.iter_fields(owner):
        if not isinstance(nodes, list):
            continue
        statements = [node for node in nodes if isinstance(node, ast.stmt)]
        for start in range(len(statements) - length + 1):
            yield statements[start : start + length]
        for node in nodes:
            nested = isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case))
            if nested and not isinstance(node, DEFINITIONS):
                yield from _runs(node, length)


def _header(node: ast.stmt, decorated: bool) -> list[str]:
    ignored = _BODIES - {"decorator_list"} if decorated else _BODIES
    return [
        f"{name}={_dump(value)}"
        for name, value in ast.iter_fields(node)
        if name not in ignored
    ]


def _dump(value: object) -> str:
    if isinstance(value, list):
        return str([_dump(item) for item in value])
    return ast.dump(value) if isinstance(value, ast.AST) else repr(value)
