# SPDX-License-Identifier: Apache-2.0
"""Step timing's hooks surround what they time, on every release they fit."""

from __future__ import annotations

import ast

import pytest
from hook_places import (
    ENGINE_BEGIN,
    WORKER_BEGIN,
    called,
    function,
    hook_code,
    hooks,
    one,
    returns,
)
from release_trees import (
    FACTORY,
    MIXIN,
    MULTI,
    RELEASES,
    SCHEDULER,
    V1,
    V2,
    V2_RUNNER,
    WORKER,
    copy_of_release,
)

import blockpatch
from blockpatch import Tree


@pytest.fixture(scope="module", params=RELEASES)
def patched(request, tmp_path_factory) -> Tree:
    """One release with both patches, to be read only."""
    tree = copy_of_release(request.param, tmp_path_factory.mktemp("patched"))
    blockpatch.apply(tree, [V1, V2])
    return tree


@pytest.mark.slow
def test_schedule_is_timed_from_its_first_call_to_its_only_return(patched):
    schedule = function(patched, SCHEDULER, "Scheduler.schedule")
    begin = one(schedule, "ENGINE_STEPS.schedule_began_ns = now_ns()")
    assert not called(begin.before)
    # v2 begins once more, after it has read the CPU clock: that is not schedule()'s.
    assert hook_code(begin.after[0]) == "ENGINE_STEPS.begin_schedule()"
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
    assert not called(one(update, "ENGINE_STEPS.begin_update()").before)
    end = one(update, "ENGINE_STEPS.end_update()")
    (only,) = (node for node in returns(update) if node.value is not None)
    assert [statement.lineno for statement in end.after] == [only.lineno]


def test_execute_model_is_timed_alone(patched):
    execute = function(patched, WORKER, "Worker.execute_model")
    begin = one(execute, "WORKER_STEPS.begin_step(self.rank, scheduler_output)")
    assert called(begin.after[:1]) == ["execute_model"]
    assert hook_code(begin.after[1]) == "WORKER_STEPS.end_execute_model()"


def test_every_connector_that_is_made_is_timed(patched):
    """Whatever signature it has, and a MultiConnector's children as well."""
    create = function(patched, FACTORY, "KVConnectorFactory.create_connector")
    made = returns(create)
    assert len(made) == called([create]).count("connector_cls")
    for node in made:
        assert ast.unparse(node.value).startswith("timed(connector_cls(config, role")
        assert ast.unparse(node.value).endswith("), role)")
    init = function(patched, MULTI, "MultiConnector.__init__")
    (loop,) = (node for node in ast.walk(init) if isinstance(node, ast.For))
    assert called([init]).count("connector_cls") == 1
    make, time = map(ast.unparse, loop.body[:2])
    assert make.startswith("self._connectors.append(connector_cls(")
    assert time == "timed(self._connectors[-1], role, len(self._connectors) - 1)"


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
