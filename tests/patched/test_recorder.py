# SPDX-License-Identifier: Apache-2.0
"""No call of a connector stays untimed, and each counts in its own step, once."""

from __future__ import annotations

import statistics

import pytest
from recorder_connectors import METHODS, SPIN_US
from recorder_lab import NUM_BLOCKS, calls_of, run, us_of

PATCHES = ["step_timing_v1", "step_timing_v2"]

HOW = ["alone", "with_two_steps_in_flight", "in_multi", "in_the_v2_runners_path"]

# What a step calls, on either side; most were in no record before.
CALLED = {
    "SCHEDULER": {
        *("get_num_new_matched_tokens", "update_state_after_alloc", "take_events"),
        *("build_connector_meta", "of_its_own", "update_connector_output"),
    },
    "WORKER": {
        *("bind_connector_metadata", "start_load_kv", "wait_for_layer_load"),
        *("save_kv_layer", "wait_for_save", "get_finished", "has_connector_metadata"),
        *("get_block_ids_with_load_errors", "get_kv_connector_stats"),
        *("get_kv_connector_kv_cache_events", "build_connector_worker_meta"),
        *("clear_connector_metadata", "handle_preemptions"),
    },
}

# What calls what on the scheduler's side; the base class does so in later releases.
CALLS = {
    "build_connector_meta": "of_its_own",
    "bind_kv_cache_manager": "bind_gpu_block_pool",
    "set_xfer_handshake_metadata_pp_aware": "set_xfer_handshake_metadata",
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


def own(times: dict, how: str) -> dict:
    """Those of the connector that knows the truth, by plain name."""
    prefix = "Busy[1]." if how == "in_multi" else ""
    return {
        name.removeprefix(prefix): value
        for name, value in times.items()
        if name.startswith(prefix) and name.count(".") == prefix.count(".")
    }


@pytest.mark.parametrize("how", HOW)
def test_every_call_counts_in_its_step(model, folder, how):
    found = run(model, folder, how)
    assert (found.scheduled_early > 50) == (how == "with_two_steps_in_flight")
    for step, calls in found.pairs():
        assert own(step.connector_calls, how) == calls_of(calls), step


@pytest.mark.parametrize("how", HOW)
def test_what_a_call_takes_is_what_the_connector_took(model, folder, how):
    found = run(model, folder, how)
    extra_us = []
    for step, calls in found.pairs():
        times = own(step.connector_us, how)
        for name, us in us_of(calls).items():
            assert times[name] > us
            extra_us.append((times[name] - us) / step.connector_calls.get(name, 1))
    assert len(extra_us) > 1_000
    assert statistics.median(extra_us) < SPIN_US / 10


@pytest.mark.parametrize("how", ["alone", "in_the_v2_runners_path"])
def test_both_worker_paths_record_the_four_calls_that_the_report_names(
    model, folder, how
):
    extra_us = []
    for step in run(model, folder, how).steps["WORKER"].values():
        since_0_30 = "get_transfer_results" in step.connector_us
        last = "get_transfer_results" if since_0_30 else "get_finished"
        fields_us = {
            "bind_connector_metadata": step.bind_us,
            "start_load_kv": step.start_load_kv_us,
            "wait_for_save": step.wait_for_save_us,
            last: step.get_finished_us,
        }
        taken_us = {name: us for name, us in fields_us.items() if us is not None}
        assert set(taken_us) == set(fields_us) & set(step.connector_us)
        extra_us += [us - step.connector_us[name] for name, us in taken_us.items()]
    assert min(extra_us) > 0
    assert statistics.median(extra_us) < SPIN_US / 10


@pytest.mark.parametrize("side", ["SCHEDULER", "WORKER"])
def test_methods_of_the_whole_interface_are_called_and_named(model, folder, side):
    found = run(model, folder, "alone")
    called = set().union(*(s.connector_calls for s in found.steps[side].values()))
    assert called >= CALLED[side]
    header = found.engine if side == "SCHEDULER" else found.worker
    assert set(header.methods) == set(METHODS) >= called


def test_the_null_model_calls_the_hooks_of_each_layer_as_attention_does(model, folder):
    found = run(model, folder, "alone")
    for step_id, step in found.steps["WORKER"].items():
        computes = found.steps["SCHEDULER"][step_id].scheduled > 0
        for name in ("wait_for_layer_load", "save_kv_layer"):
            assert step.connector_calls.get(name, 0) == 48 * computes
    names, shapes, metadata = map(set, zip(*found.saved, strict=True))
    assert names == {f"layers.{number}.attention" for number in range(48)}
    # Its dimension was the second one once, after keys and values.
    (shape,) = shapes
    assert NUM_BLOCKS in shape[:2]
    assert metadata == {"CPUAttentionMetadata"}


def test_own_time_is_without_what_the_call_calls(model, folder):
    for step in run(model, folder, "alone").steps["SCHEDULER"].values():
        times = step.connector_us
        assert "build_connector_meta" in times
        inner = {outer: times[CALLS[outer]] for outer in CALLS if outer in times}
        own_us = {name: us - inner.get(name, 0) for name, us in times.items()}
        assert step.connector_self_us == pytest.approx(own_us)


def test_children_of_a_multi_connector_are_apart_and_add_up(model, folder):
    found = run(model, folder, "in_multi")
    for side in found.steps.values():
        for step in side.values():
            times, self_us = step.connector_us, step.connector_self_us
            outer = {name for name in times if "[" not in name}
            assert sum(self_us.values()) == pytest.approx(sum(map(times.get, outer)))
            for name in outer:
                children = [times.get(f"{c}.{name}", 0) for c in CHILDREN]
                assert self_us[name] + sum(children) == pytest.approx(times[name])
                assert children[1] > SPIN_US
    assert "NoopConnector[0].build_connector_meta" in found.engine.methods
    # It only returns a constant: it has no time that could be taken.
    assert "NoopConnector[0].save_kv_layer" not in found.worker.methods
    assert "save_kv_layer" in found.worker.methods


CHILDREN = ("NoopConnector[0]", "Busy[1]")
