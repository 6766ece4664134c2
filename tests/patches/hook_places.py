# SPDX-License-Identifier: Apache-2.0
"""Where step timing's hooks are, read off the patched files' syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from release_trees import CORE

from blockpatch import Tree


def names_of_recorders(module: ast.Module) -> set[str]:
    """Names of step_records that the hooks use."""
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    return used & {"ENGINE_STEPS", "WORKER_STEPS", "now_ns", "timed"}


def names_imported(module: ast.Module) -> set[str]:
    """Names of step_records that the module binds for all of its functions."""
    return {
        alias.asname or alias.name
        for node in module.body
        if isinstance(node, ast.ImportFrom) and node.module == "vllm.v1.step_records"
        for alias in node.names
    }


class Hook(NamedTuple):
    """A statement on a recorder, and the statements before and after it in its body."""

    code: str
    before: list[ast.stmt]
    after: list[ast.stmt]


def function(tree: Tree, path: str, scope: str) -> ast.FunctionDef:
    node: ast.AST = ast.parse((tree.root / path).read_bytes())
    for name in scope.split("."):
        node = next(
            child
            for child in ast.walk(node)
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and child.name == name
        )
    return node


def hook_code(statement: ast.stmt) -> str | None:
    """The one statement in `if ENGINE_STEPS is not None: ...`."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return None
    test = ast.unparse(statement.test)
    if test not in ("ENGINE_STEPS is not None", "WORKER_STEPS is not None"):
        return None
    (body,) = statement.body
    code = ast.unparse(body)
    assert code.startswith(f"{test.split()[0]}.")
    return code


def hooks(node: ast.AST) -> Iterator[Hook]:
    for child in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(child, name, [])
            if not isinstance(statements, list):
                continue
            for index, statement in enumerate(statements):
                if (code := hook_code(statement)) is not None:
                    yield Hook(code, statements[:index], statements[index + 1 :])


def called(statements: list[ast.stmt]) -> list[str]:
    """Names of the functions and methods called in the statements."""
    return [
        getattr(node.func, "attr", getattr(node.func, "id", ""))
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
    ]


def one(node: ast.AST, code: str) -> Hook:
    (found,) = (hook for hook in hooks(node) if hook.code == code)
    return found


def check_step_ends_right_after_update(tree: Tree, name: str, patches: int) -> None:
    """Each patch ends the step itself, so that it can do without the other."""
    first, *rest = hooks(function(tree, CORE, f"EngineCore.{name}"))
    assert called(first.before[-1:]) == ["update_from_output"]
    ends = [first.code, *map(hook_code, first.after[: len(rest)])]
    assert ends == ["ENGINE_STEPS.end_step(scheduler_output)"] * patches


def returns(node: ast.FunctionDef) -> list[ast.Return]:
    """Return statements of the function itself, nested functions apart."""
    nested = {
        id(inner)
        for child in ast.walk(node)
        if isinstance(child, (ast.FunctionDef, ast.Lambda)) and child is not node
        for inner in ast.walk(child)
    }
    found = [child for child in ast.walk(node) if isinstance(child, ast.Return)]
    return [child for child in found if id(child) not in nested]


ENGINE_BEGIN = "ENGINE_STEPS.began_ns = now_ns()"
WORKER_BEGIN = "WORKER_STEPS.began_ns = now_ns()"
