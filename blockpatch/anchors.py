# SPDX-License-Identifier: Apache-2.0
"""Finding an anchor statement in the syntax tree of a pristine file.

Comparison is by syntax tree, so comments, whitespace and quote style do not count. A
compound statement is given by its header alone and compared without its body.
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
COMPOUND = (
    *DEFINITIONS,
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith),
    *(ast.Try, ast.TryStar, ast.Match),
)
_BODIES = {"body", "orelse", "handlers", "finalbody", "cases", "decorator_list"}
_STAND_IN_BODIES = (
    "\n    pass",
    "\n    pass\nfinally:\n    pass",
    "\n    case _:\n        pass",
)


class Statement(NamedTuple):
    """Lines ``[start, end)`` of a whole statement, decorators included."""

    start: int
    end: int
    indent: bytes


def parse_quietly(text: str | bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def parse_anchor(text: str) -> ast.stmt:
    """The one statement (or header of one) that ``text`` is; else ManifestError."""
    source = textwrap.dedent(text).strip()
    for number, body in enumerate(("", *_STAND_IN_BODIES)):
        try:
            statements = parse_quietly(source + body).body
        except (SyntaxError, ValueError):
            continue
        if len(statements) != 1:
            break
        if number == 0 and isinstance(statements[0], COMPOUND):
            raise ManifestError(
                f"anchor {text!r}: give the header alone, without its body"
            )
        return statements[0]
    raise ManifestError(f"anchor {text!r} is not one Python statement or header")


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
        """The only statement in ``scope`` that equals ``anchor``.

        Raises AnchorError if there is none or more than one, or if it shares a line.
        """
        scopes = self._scopes(scope)
        wanted = parse_anchor(anchor)
        decorated = bool(getattr(wanted, "decorator_list", None))
        shape = _shape(wanted, decorated)
        matches = [
            node
            for owner in scopes
            for node in _statements(owner)
            if type(node) is type(wanted)
            and not self._is_elif(node)
            and _shape(node, decorated) == shape
        ]
        if len(matches) != 1:
            lines = ", ".join(str(node.lineno) for node in matches)
            raise AnchorError(
                f"{self.file}: anchor {anchor.strip()!r} in scope {scope or 'module'!r}"
                f" matches {len(matches)} statements"
                + (f" (lines {lines})" if matches else "")
                + ", exactly one is needed"
            )
        return self._statement(matches[0])

    def _scopes(self, scope: str) -> list[ast.AST]:
        """All definitions with that path (a property has several of one name)."""
        owners: list[ast.AST] = [self.tree]
        for name in filter(None, scope.split(".")):
            owners = [
                node
                for owner in owners
                for node in _statements(owner)
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


def _statements(owner: ast.AST) -> Iterator[ast.stmt]:
    """Statements at any depth, not entering nested functions and classes."""
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(
            node, (ast.stmt, ast.ExceptHandler, ast.match_case)
        ) and not isinstance(node, DEFINITIONS):
            yield from _statements(node)


def _shape(node: ast.stmt, decorated: bool) -> list[str]:
    """What is compared: everything of a simple statement, the header of others."""
    if not isinstance(node, COMPOUND):
        return [ast.dump(node)]
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
