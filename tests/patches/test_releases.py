# SPDX-License-Identifier: Apache-2.0
"""The patches on the files of every release they say they fit."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import blockpatch
from blockpatch import Patch, Tree
from lab.paths import PATCHES, REPOSITORY
from lab.serving.tree import installed_package

ALL = blockpatch.load_patches(PATCHES)
V1, V2 = ALL["step_timing_v1"], ALL["step_timing_v2"]
INSTALLED = "0.18.1"
RELEASES = sorted({version for patch in (V1, V2) for version in patch.tested})

SCHEDULER = "v1/core/sched/scheduler.py"
CORE = "v1/engine/core.py"
WORKER = "v1/worker/gpu_worker.py"
MIXIN = "v1/worker/kv_connector_model_runner_mixin.py"
V2_RUNNER = "v1/worker/gpu/kv_connector.py"


def copy_of(patch: Patch, source: Path, place: Path) -> Tree:
    """A private copy of the files of a package that any patch touches."""
    tree = place / patch.package
    patches = [other for other in ALL.values() if other.package == patch.package]
    touched = {spec.file for other in patches for spec in other.blocks}
    for path in touched | {"__init__.py", "_version.py"}:
        if (source / path).exists():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / path, tree / path)
    return Tree(tree)


def copy_of_installed(patch: Patch, place: Path) -> Tree:
    try:
        return copy_of(patch, installed_package(patch.package), place)
    except ModuleNotFoundError:
        pytest.skip(f"{patch.package} is not installed")


@pytest.fixture
def vllm(tmp_path) -> Tree:
    return copy_of_installed(V1, tmp_path)


def copy_of_release(version: str, place: Path) -> Tree:
    """A private copy of one release's Python files."""
    if version == INSTALLED:
        return copy_of_installed(V1, place)
    source = REPOSITORY / "third_party" / f"vllm-{version}" / "vllm"
    if not source.is_dir():
        pytest.skip(f"no {source.relative_to(REPOSITORY)}: run make vllm-releases")
    return copy_of(V1, source, place)


@pytest.fixture(params=RELEASES)
def release(request, tmp_path) -> Tree:
    return copy_of_release(request.param, tmp_path)


@pytest.fixture(scope="module", params=RELEASES)
def patched(request, tmp_path_factory) -> Tree:
    """One release with both patches, to be read only."""
    tree = copy_of_release(request.param, tmp_path_factory.mktemp("patched"))
    blockpatch.apply(tree, [V1, V2])
    return tree


def python_files(tree: Tree) -> dict[str, bytes]:
    return {
        str(path.relative_to(tree.root)): path.read_bytes()
        for path in sorted(tree.root.rglob("*.py"))
    }


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {path for path in after if before.get(path) != after[path]}


@pytest.mark.parametrize(
    ("name", "version"),
    [(name, version) for name, patch in ALL.items() for version in patch.tested],
)
def test_every_patch_comes_and_goes_to_the_byte(name, version, tmp_path):
    patch = ALL[name]
    if patch.package == "vllm":
        tree = copy_of_release(version, tmp_path)
    else:
        tree = copy_of_installed(patch, tmp_path)
    before = python_files(tree)
    blockpatch.apply(tree, [patch])
    after = python_files(tree)
    for path in changed(before, after):
        compile(after[path], path, "exec", dont_inherit=True)
    assert changed(before, after)
    blockpatch.revert(tree, [patch.name])
    assert python_files(tree) == before


def test_all_vllm_patches_together_come_and_go_to_the_byte(release):
    patches = [
        patch
        for patch in ALL.values()
        if patch.package == "vllm" and release.version in patch.tested
    ]
    before = python_files(release)
    blockpatch.apply(release, patches)
    for patch in patches:
        blockpatch.revert(release, [patch.name])
    assert python_files(release) == before


def test_v1_survives_v2s_apply_and_revert(vllm):
    before = python_files(vllm)
    blockpatch.apply(vllm, [V1])
    v1_alone = python_files(vllm)
    blockpatch.apply(vllm, [V2])
    both = python_files(vllm)
    blockpatch.revert(vllm, [V2.name])
    assert python_files(vllm) == v1_alone
    blockpatch.revert(vllm, [V1.name])
    assert python_files(vllm) == before

    blockpatch.apply(vllm, [V2])
    blockpatch.apply(vllm, [V1])
    assert python_files(vllm) == both
    blockpatch.revert(vllm, [V2.name])
    assert python_files(vllm) == v1_alone


@pytest.mark.parametrize(
    "names", [[V1.name], [V2.name], [V1.name, V2.name]], ids="+".join
)
def test_step_timing_fits_the_release_and_goes_to_the_byte(release, names):
    before = python_files(release)
    blockpatch.apply(release, [ALL[name] for name in names])
    after = python_files(release)
    files = changed(before, after)
    for path in files:
        compile(after[path], path, "exec", dont_inherit=True)
    expected = {"v1/step_records.py", SCHEDULER, CORE}
    expected |= {WORKER, MIXIN, V2_RUNNER} if V2.name in names else set()
    assert files == expected
    for path in files - {"v1/step_records.py"}:
        module = ast.parse(after[path])
        assert names_of_recorders(module) == names_imported(module)
    for name in ("step", "step_with_batch_queue"):
        check_step_ends_right_after_update(release, name, len(names))
    blockpatch.revert(release, names)
    assert python_files(release) == before


# Where the hooks are: read off the patched files' syntax trees.


def names_of_recorders(module: ast.Module) -> set[str]:
    """Names of step_records that the hooks use."""
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    return used & {"ENGINE_STEPS", "WORKER_STEPS", "now_ns"}


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


def test_schedule_is_timed_from_its_first_call_to_its_only_return(patched):
    schedule = function(patched, SCHEDULER, "Scheduler.schedule")
    begin = one(schedule, "ENGINE_STEPS.schedule_began_ns = now_ns()")
    assert not called(begin.before)
    (only,) = returns(schedule)
    end = one(schedule, "ENGINE_STEPS.end_schedule(self, scheduler_output)")
    # note_block_pool comes after: what it costs is not schedule()'s.
    pool, last = end.after
    assert hook_code(pool) == "ENGINE_STEPS.note_block_pool(self, scheduler_output)"
    assert last.lineno == only.lineno
    # Tokens are counted with num_computed_tokens past this step already.
    assert "_update_after_schedule" in called(end.before)


def test_build_meta_surrounds_the_connectors_call(patched):
    begin = one(function(patched, SCHEDULER, "Scheduler.schedule"), ENGINE_BEGIN)
    build, attach, end = begin.after[:3]
    assert called([build])[0] in ("build_connector_meta", "_build_kv_connector_meta")
    assert ast.unparse(attach) == "scheduler_output.kv_connector_metadata = meta"
    assert hook_code(end) == (
        "ENGINE_STEPS.build_meta_ns = now_ns() - ENGINE_STEPS.began_ns"
    )


def test_update_is_timed_from_its_first_call_to_its_only_return(patched):
    update = function(patched, SCHEDULER, "Scheduler.update_from_output")
    assert not called(one(update, ENGINE_BEGIN).before)
    end = one(update, "ENGINE_STEPS.update_ns = now_ns() - ENGINE_STEPS.began_ns")
    (only,) = (node for node in returns(update) if node.value is not None)
    assert [statement.lineno for statement in end.after] == [only.lineno]


def test_execute_model_is_timed_alone(patched):
    execute = function(patched, WORKER, "Worker.execute_model")
    begin = one(execute, "WORKER_STEPS.begin_step(self.rank, scheduler_output)")
    assert called(begin.after[:1]) == ["execute_model"]
    assert hook_code(begin.after[1]) == "WORKER_STEPS.end_execute_model()"


METHODS = {
    "bind_connector_metadata": "bind_ns",
    "start_load_kv": "start_load_kv_ns",
    "wait_for_save": "wait_for_save_ns",
    "get_finished": "get_finished_ns",
    "get_transfer_results": "get_finished_ns",
}


# With a draft model vLLM saves only after that has run, in finalize_kv_connector() and
# finalize_step(): that wait is not timed.
WORKER_PATHS = {
    "v1_runner": (MIXIN, {"_get_kv_connector_output"}),
    "v2_runner": (V2_RUNNER, {"pre_forward", "_start_load_kv", "post_forward"}),
}


@pytest.mark.parametrize(("path", "names"), WORKER_PATHS.values(), ids=WORKER_PATHS)
def test_each_connector_method_is_surrounded_in_both_worker_paths(patched, path, names):
    def connector_calls(node: ast.AST) -> dict[int, str]:
        """Field by line of the calls of the connector's timed methods."""
        return {
            call.lineno: METHODS[call.func.attr]
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
            and getattr(call.func, "attr", None) in METHODS
            and ast.unparse(call.func.value).endswith("kv_connector")
        }

    functions = [
        node
        for node in ast.walk(ast.parse((patched.root / path).read_bytes()))
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    timed: dict[int, str] = {}
    found = [hook for node in functions for hook in hooks(node)]
    for begin in found:
        if begin.code == WORKER_BEGIN:
            between, end = begin.after[:2]
            inside = connector_calls(between)
            (field,) = set(inside.values())
            assert hook_code(end) == (
                f"WORKER_STEPS.{field} += now_ns() - WORKER_STEPS.began_ns"
            )
            timed |= inside
    # Every end has its begin.
    assert [hook.code for hook in found].count(WORKER_BEGIN) * 2 == len(found)
    assert set(timed.values()) == set(METHODS.values())
    assert timed == {
        line: field
        for node in functions
        for line, field in connector_calls(node).items()
    }
