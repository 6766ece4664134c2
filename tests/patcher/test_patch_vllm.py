# SPDX-License-Identifier: Apache-2.0
"""The promises on copies of real vLLM files."""

import ast
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtax.patcher import (
    AnchorError,
    CompileError,
    ConflictError,
    TargetError,
    Tree,
    apply,
    find_package,
    revert,
)
from kvtax.patcher.anchors import Source
from kvtax.patcher.blocks import parse
from tests.patcher.patchlab import block, make_patch, snapshot

FILES = (
    "__init__.py",
    "_version.py",
    "v1/core/block_pool.py",
    "v1/core/sched/scheduler.py",
    "v1/engine/core.py",
    "v1/worker/kv_connector_model_runner_mixin.py",
)
SMALL = ("v1/core/block_pool.py", "v1/worker/kv_connector_model_runner_mixin.py")


def installed() -> Path:
    site = Path(__file__).resolve().parents[2] / ".venv"
    try:
        return find_package("vllm", site.glob("lib/python3*/site-packages"))
    except TargetError:
        pytest.skip("vllm is not installed")


@pytest.fixture(scope="module")
def vllm(memory_folder):
    source = installed()
    for path in FILES:
        place = memory_folder / "vllm" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, place)
    return Tree(memory_folder / "vllm")


def headers(tree: Tree, path: str) -> list[tuple[str, str]]:
    """(scope, anchor text) of every statement in a file, none left out."""
    matches = []

    def walk(node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.stmt):
                matches.append((scope, header(child)))
                if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                    inner = f"{scope}.{child.name}".lstrip(".")
            walk(child, inner)

    walk(ast.parse((tree.root / path).read_bytes()), "")
    return matches


def header(node: ast.stmt) -> str:
    node = ast.parse(ast.unparse(node)).body[0]
    if not hasattr(node, "body"):
        return ast.unparse(node)
    if isinstance(node, ast.Try):
        return "try:"
    node.body = [ast.Pass()]
    for name in ("orelse", "decorator_list"):
        if hasattr(node, name):
            setattr(node, name, [])
    return ast.unparse(node).removesuffix("pass").rstrip()


@pytest.mark.slow
def test_blocks_at_any_real_statement_come_and_go_without_a_trace(vllm, tmp_path):
    before = snapshot(vllm.root)
    outcomes: Counter[str] = Counter()
    anchors = [(path, *entry) for path in SMALL for entry in headers(vllm, path)]
    places = st.tuples(
        st.sampled_from(anchors), st.sampled_from(["before", "after", "replace"])
    )

    @settings(
        max_examples=80,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(st.lists(places, min_size=2, max_size=3), st.randoms())
    def come_and_go(chosen, random):
        patches = []
        for number, ((path, scope, anchor), where) in enumerate(chosen):
            spec = block(where, scope, anchor, f"x{number} = {number}", file=path)
            patches.append(make_patch(tmp_path, f"p{number}", [spec], package="vllm"))
        names = [patch.name for patch in patches]
        try:
            try:
                apply(vllm, patches)
            except (AnchorError, CompileError, ConflictError) as error:
                outcomes[type(error).__name__] += 1
                assert snapshot(vllm.root) == before
                return
            outcomes["applied"] += 1
            together = snapshot(vllm.root)
            assert together != before
            random.shuffle(names)
            revert(vllm, names[:1])
            apply(vllm, [patch for patch in patches if patch.name == names[0]])
            assert snapshot(vllm.root) == together
        finally:
            revert(vllm, names)
        assert snapshot(vllm.root) == before

    come_and_go()
    assert outcomes["applied"] >= 10, outcomes


@pytest.mark.slow
def test_every_statement_that_is_unique_in_its_scope_is_found(vllm):
    for path in FILES:
        lines = parse((vllm.root / path).read_bytes()).lines
        source = Source(lines, path)
        entries = headers(vllm, path)
        anchors = unique = 0
        for entry, count in Counter(entries).items():
            if count > 1:
                continue
            unique += 1
            try:
                statement = source.find(*entry)
            except AnchorError:
                continue
            anchors += 1
            text = b"".join(lines[statement.start : statement.end])
            tree = ast.parse(b"if 1:\n" + text if statement.indent else text)
            node = tree.body[0].body[0] if statement.indent else tree.body[0]
            assert header(node) == entry[1]
        # Not found are elif branches and one-name definitions in two branches.
        assert anchors >= 0.95 * unique, (path, anchors, unique)
