# SPDX-License-Identifier: Apache-2.0
"""Docstrings keep the rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kvtax.paths import REPOSITORY
from tests.test_architecture import parsed, sources, statements

# Words that begin a clause without a subject (rule 3).
HEADLESS = {
    *("What", "Those", "Of", "So", "That", "Which", "Where", "Whoever", "Whether"),
    *("As", "By", "How", "Who", "Whose", "If", "None", "Nobody", "Nothing"),
}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module."""
    for node in [tree, *statements(tree)]:
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def test_no_docstring_begins_with_a_clause_that_has_no_subject():
    headless = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text.splitlines()[0]}"
        for path in sources(REPOSITORY)
        if "tests" not in path.relative_to(REPOSITORY).parts
        for line, text in docstrings(parsed(path))
        if text.split(maxsplit=1)[0].strip(",:") in HEADLESS
    ]
    assert headless == []
