# SPDX-License-Identifier: Apache-2.0
"""Docstrings keep the rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from kvtax.paths import REPOSITORY
from tests.test_architecture import parsed, sources, statements

# Words that begin a clause without a subject (rule 3).
HEADLESS = {
    *("What", "Those", "Of", "So", "That", "Which", "Where", "Whoever", "Whether"),
    *("As", "By", "How", "Who", "Whose", "If", "None", "Nobody", "Nothing"),
}


# Calls that an assert may make.
PURE = {"all", "isinstance", "len"}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module."""
    for node in [tree, *statements(tree)]:
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


@pytest.mark.slow
def test_no_assert_does_work_that_python_minus_o_leaves_out():
    working = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in sources(REPOSITORY)
        if not {"tests", "bench", "studies"} & {*path.relative_to(REPOSITORY).parts}
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert)
        for call in ast.walk(node.test)
        if isinstance(call, ast.Call)
        and not (isinstance(call.func, ast.Name) and call.func.id in PURE)
    ]
    assert working == []


@pytest.mark.slow
def test_no_docstring_begins_with_a_clause_that_has_no_subject():
    headless = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text.splitlines()[0]}"
        for path in sources(REPOSITORY)
        if "tests" not in path.relative_to(REPOSITORY).parts
        for line, text in docstrings(parsed(path))
        if text.split(maxsplit=1)[0].strip(",:") in HEADLESS
    ]
    assert headless == []
