# SPDX-License-Identifier: Apache-2.0
"""Check the rules of CONTRIBUTING.md that a program can check, and print the sums.

    python -m tools.style      exit code 1 if a rule is broken; each place is named

Checked of Python: no variable, argument, field or function is called `one`, `found` or
`told`. Outside tests: no docstring begins with a clause that has no subject, and a
function's begins with no article; no assert does work that `python -O` leaves out.
Checked of README, docs and SUMMARY: no sentence has more than MOST_WORDS words.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtax.paths import REPOSITORY

EMPTY_NAMES = {"one", "found", "told"}
# Words that begin a clause without a subject.
HEADLESS = {
    *("What", "Those", "Of", "So", "That", "Which", "Where", "Whoever", "Whether"),
    *("As", "By", "How", "Who", "Whose", "If", "None", "Nobody", "Nothing"),
}
# Words that begin a noun phrase, where a function's docstring needs a verb.
NOMINAL = {"A", "An", "The", "All", "Each", "Every", "At", "In", "With", "Again", "It"}
# Calls that an assert may make.
PURE = {"all", "any", "isinstance", "issubclass", "len"}
MOST_WORDS = 30
PAGES = ("README.md", "SUMMARY.md", "SECURITY.md", "docs/")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
# Parts of a page that hold no prose: code, tables, figures of a command.
NO_PROSE = re.compile(r"^(    |\s*\||```|#|<!--|!\[)")


def tracked(pattern: str) -> list[str]:
    """List the files of git that match a pattern."""
    command = ["git", "ls-files", "-z", pattern]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    names = listed.stdout.decode().split("\0")[:-1]
    return [name for name in names if (REPOSITORY / name).is_file()]


def is_test(name: str) -> bool:
    """Return whether a file belongs to the tests."""
    return "tests" in Path(name).parts or name.endswith("conftest.py")


def names_bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each binding: variables, arguments, fields, functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, FUNCTIONS):
            yield node.lineno, node.name


def faults_of(tree: ast.Module, *, of_test: bool) -> Iterator[tuple[int, str]]:
    """Yield line and fault of each place of a module that breaks a rule."""
    for line, name in names_bound(tree):
        if name in EMPTY_NAMES:
            yield line, f"the name {name!r} says nothing: name the thing"
    if of_test:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS):
            yield from _docstring_fault(node)
        elif isinstance(node, ast.Assert):
            for call in ast.walk(node.test):
                if isinstance(call, ast.Call) and not _is_pure(call):
                    yield node.lineno, "an assert calls a function: python -O skips it"


def _docstring_fault(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[int, str]]:
    first = (ast.get_docstring(node) or "").partition(" ")[0].strip(",:.")
    line = 1 if isinstance(node, ast.Module) else node.lineno
    if first in HEADLESS:
        yield line, f"the docstring begins with {first!r}: put the subject first"
    elif first in NOMINAL and isinstance(node, FUNCTIONS) and not _is_value(node):
        yield line, f"the docstring begins with {first!r}: begin with a verb"


def _is_value(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read like an attribute."""
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name.endswith("property") for name in names)


def _is_pure(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in PURE


def long_sentences(text: str) -> Iterator[str]:
    """Yield the prose sentences of a page that have more than MOST_WORDS words."""
    lines, fenced = [], False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        lines.append("\n" if fenced or NO_PROSE.match(line) else line)
    for block in re.split(r"\n\s*\n|\n(?=[-*\d])", "\n".join(lines)):
        for sentence in re.split(r"(?<=[.:;?!])[\s*)\"]+", block):
            if len(sentence.split()) > MOST_WORDS:
                yield " ".join(sentence.split())


def sums() -> str:
    """Count files, lines of Python and of Go and Rust, and words of Markdown."""
    files = tracked("*")

    def count(*suffixes: str, tests: bool | None = None) -> int:
        return sum(
            (REPOSITORY / name).read_bytes().count(b"\n")
            for name in files
            if name.endswith(suffixes) and tests in (None, is_test(name))
        )

    pages = [name for name in files if name.endswith(".md")]
    words = sum(len((REPOSITORY / page).read_text().split()) for page in pages)
    return (
        f"{len(files)} files; Python: {count('.py', tests=False):,} lines, tests "
        f"{count('.py', tests=True):,}; Go and Rust: {count('.go', '.rs'):,}; "
        f"{words:,} words in {len(pages)} pages"
    )


def main() -> int:
    """Print each broken rule and the sums; return 1 if a rule is broken."""
    faults = [
        f"{name}:{line}: {fault}"
        for name in tracked("*.py")
        for line, fault in faults_of(
            ast.parse((REPOSITORY / name).read_bytes()), of_test=is_test(name)
        )
    ]
    faults += [
        f"{name}: over {MOST_WORDS} words: {sentence[:90]} ..."
        for name in tracked("*.md")
        if name.startswith(PAGES)
        for sentence in long_sentences((REPOSITORY / name).read_text())
    ]
    print("\n".join([*faults, sums()]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
