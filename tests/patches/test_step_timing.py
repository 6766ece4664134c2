# SPDX-License-Identifier: Apache-2.0
"""The step records against what a real engine core was asked to do."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtax.engine.environment import engine_environment, record_steps
from kvtax.engine.null_model import CPU_ENGINE, null_checkpoint
from kvtax.engine.overlay import build_overlay
from kvtax.engine.preloaded import Preloaded
from kvtax.engine.server import tail
from kvtax.proc.ports import reserve
from kvtax.records.steps import only_life
from tests.proc.living import eventually
from tests.releases import INSTALLED, under_test

DEADLINE_S = 900
# What an engine with the null model needs here on later releases.
ON_A_CPU = ("cpu_uniproc", "cpu_small_blocks")


class ScriptProcess:
    """One run of `script(model, result, *arguments)` in a folder of its own.

    `records` is where step records go.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        patches: list[str],
        *arguments: str,
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.records = folder / "records"
        self.records.mkdir()
        self.log = folder / "log"
        self._result = folder / "result.json"
        model = null_checkpoint(folder / "model")
        installed = under_test()
        overlay = folder / "overlay"
        build_overlay(overlay, [*patches, *ON_A_CPU], {}, installed)
        env = engine_environment(overlay, CPU_ENGINE, reserve(1)[0], installed)
        env |= record_steps(self.records, {"test": 1})
        module = ("-m", f"tests.patches.{script}", str(model), str(self._result))
        command = installed.command(*module, *arguments)
        self.process = Preloaded(command, env, self.log)

    def result(self) -> dict:
        """The script's result file. Fails unless the script ends well."""
        try:
            status = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running\n{tail(self.log)}") from None
        assert status == 0, tail(self.log, 60)
        return json.loads(self._result.read_text())

    def __enter__(self) -> ScriptProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.stop()


pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
ENGINE_FIELDS = {
    *("step_id", "t_ns", "schedule_us", "build_meta_us", "step_us", "update_us"),
    *("running", "waiting", "scheduled", "prefill_tokens", "decode_tokens"),
    *("cache_size", "free_blocks", "schedule_cpu_us", "update_cpu_us"),
}
# The first has no step before it, most have no preemption, and the no-op connector's
# calls are in fields of their own, but for those of requests.
SOMETIMES = {"thread_cpu_us", "preemptions", "connector_calls", "connector_self_us"}
WORKER_PARTS = ("bind_us", "start_load_kv_us", "wait_for_save_us", "get_finished_us")
WORKER_FIELDS = {"step_id", "t_ns", "execute_model_us", *WORKER_PARTS}
# Of the connector's other methods; some releases call one in some steps.
WORKER_SOMETIMES = {"connector_us", "connector_self_us"}
PATCHES = ["step_timing_v2"]
FILES = ["engine_request", "engine_step", "threads", "worker_step.r0"]


@pytest.fixture(scope="module")
def processes(installed_vllm, tmp_path_factory):
    """The engines by scenario; all start at once, because a start mostly waits."""
    place = tmp_path_factory.mktemp("engines")
    (place / "scenarios").mkdir()
    script = "engine_script"
    with ExitStack() as stack:

        def start(name: str, patches: list[str], *arguments: str):
            process = ScriptProcess(place / name, script, patches, *arguments)
            return stack.enter_context(process)

        yield {
            "all": start("all", PATCHES, "all", str(place / "scenarios")),
            "killed": start("killed", PATCHES, "until_killed"),
            "scenarios": place / "scenarios",
        }


@pytest.fixture(scope="module")
def found(processes):
    return processes["all"].result()


@pytest.fixture(scope="module")
def engine_steps(processes, found):
    return records(only_life(processes["all"].records) / "engine_step.jsonl")[1]


@pytest.fixture(scope="module")
def worker_steps(processes, found):
    return records(only_life(processes["all"].records) / "worker_step.r0.jsonl")[1]


def records(path: Path) -> tuple[dict, list[dict]]:
    """Header and records of a file of whole lines."""
    text = path.read_bytes()
    assert text.endswith(b"\n")
    header, *lines = map(json.loads, text.splitlines())
    return header, lines


def of_phase(steps: list[dict], phase: dict) -> list[dict]:
    return steps[phase["first"] : phase["end"]]


def total(steps: list[dict], field: str) -> int:
    return sum(step.get(field, 0) for step in steps)


def test_header_says_what_the_file_is(processes, found):
    for name in ("engine_step", "worker_step.r0"):
        life = only_life(processes["all"].records)
        header, _ = records(life / f"{name}.jsonl")
        assert header["life"] == life.name
        assert header["schema"] == f"kvtax.{name.partition('.')[0]}/1"
        assert header["clock"] == "CLOCK_MONOTONIC"
        assert header["vllm_version"].startswith(INSTALLED)
        assert header["label"] == {"test": 1}


def test_every_engine_step_has_one_engine_and_one_worker_record(
    found, engine_steps, worker_steps
):
    steps = found["phases"]["preempting"]["end"]
    assert [step["step_id"] for step in engine_steps] == list(range(steps))
    # The last one too, which no next step ends.
    assert [step["step_id"] for step in worker_steps] == list(range(steps))
    for step in engine_steps:
        assert ENGINE_FIELDS <= set(step) <= ENGINE_FIELDS | SOMETIMES
        assert ("thread_cpu_us" in step) == (step["step_id"] > 0)
    for engine, worker in zip(engine_steps, worker_steps, strict=True):
        waits = engine["scheduled"] > 0 or found["idle_steps_wait_for_saves"]
        always = WORKER_FIELDS - (set() if waits else {"wait_for_save_us"})
        assert always == set(worker) - WORKER_SOMETIMES


def test_tokens_reconcile_with_what_the_requests_had(found, engine_steps):
    phase = found["phases"]["mixed"]
    steps = of_phase(engine_steps, phase)
    assert phase["cached_tokens"] == 48  # three blocks of the repeated prompt
    assert total(steps, "prefill_tokens") == phase["prompt"] - phase["cached_tokens"]
    # A request's first token comes with its prefill.
    decoded = sum(output - 1 for output in phase["outputs"])
    assert total(steps, "decode_tokens") == decoded
    assert total(steps, "preemptions") == 0


def test_last_prompt_chunk_of_one_token_counts_as_a_decode(found, engine_steps):
    phase = found["phases"]["one_token_chunk"]
    steps = of_phase(engine_steps, phase)
    assert total(steps, "prefill_tokens") == phase["prompt"] - 1
    assert total(steps, "decode_tokens") == sum(n - 1 for n in phase["outputs"]) + 1


def test_cache_size_follows_the_block_arithmetic(found, engine_steps):
    phase = found["phases"]["single"]
    steps = of_phase(engine_steps, phase)
    prompt, output = phase["prompt"], phase["output"]
    # Step k computes the prompt and k more tokens; the last step only cleans up.
    computed = [prompt + k for k in range(output)] + [prompt + output - 1]
    assert [step["cache_size"] for step in steps] == [n // BLOCK_SIZE for n in computed]

    mixed = of_phase(engine_steps, found["phases"]["mixed"])
    sizes = [step["cache_size"] for step in mixed]
    assert sizes == sorted(sizes)
    assert sizes[-1] == found["phases"]["mixed"]["blocks"]


def test_cache_size_is_zero_after_a_reset(found, engine_steps):
    before = engine_steps[found["phases"]["after_reset"]["first"] - 1]
    after = of_phase(engine_steps, found["phases"]["after_reset"])
    assert before["cache_size"] > 1_000
    assert {step["cache_size"] for step in after} == {0}


def test_preemptions_are_counted_and_blocks_run_out(found, engine_steps):
    phase = found["phases"]["preempting"]
    steps = of_phase(engine_steps, phase)
    assert phase["preemptions"] > 0
    assert total(steps, "preemptions") == phase["preemptions"]
    assert min(step["free_blocks"] for step in steps) < 50
    assert max(step["waiting"] for step in steps) > 0
    assert all(step["scheduled"] <= step["running"] for step in steps)


def test_parts_of_a_step_fit_into_it(engine_steps, worker_steps):
    for engine, worker in zip(engine_steps, worker_steps, strict=True):
        assert 0 < engine["build_meta_us"] <= engine["schedule_us"]
        assert engine["update_us"] > 0
        parts = engine["schedule_us"] + worker["execute_model_us"] + engine["update_us"]
        assert parts <= engine["step_us"]
        parts = [worker[name] for name in WORKER_PARTS if name in worker]
        assert min(parts) > 0
        assert sum(parts) <= worker["execute_model_us"]
        end_ns = engine["t_ns"] + 1e3 * engine["step_us"]
        assert engine["t_ns"] < worker["t_ns"] < end_ns


def test_steps_join_when_the_next_is_scheduled_before_the_last_is_updated(
    processes, found
):
    folder = only_life(processes["scenarios"] / "queue")
    engine = {s["step_id"]: s for s in records(folder / "engine_step.jsonl")[1]}
    worker = {s["step_id"]: s for s in records(folder / "worker_step.r0.jsonl")[1]}
    events = found["batch_queue"]["events"]
    order = [(kind, step_id) for kind, step_id, *_ in events]
    overlapping = [
        step_id
        for step_id in engine
        if ("schedule", step_id + 1) in order
        and order.index(("schedule", step_id + 1)) < order.index(("update", step_id))
    ]
    assert len(overlapping) > 50
    late_ns = []
    for kind, step_id, *facts in events:
        step = engine[step_id]
        if kind == "schedule":
            tokens, scheduled = facts
            assert step["prefill_tokens"] + step["decode_tokens"] == tokens
            assert step["scheduled"] == scheduled
        else:
            end_ns = step["t_ns"] + 1e3 * step["step_us"]
            late_ns.append(end_ns - facts[0])
            assert step["update_us"] < step["step_us"]
    # Now and then the machine stalls between the two.
    assert abs(statistics.median(late_ns)) < 1e6
    assert (
        engine.keys()
        == worker.keys()
        == {run[0] for run in found["batch_queue"]["runs"]}
    )
    for step_id, start_ns, end_ns in found["batch_queue"]["runs"]:
        assert start_ns <= worker[step_id]["t_ns"] <= end_ns
        assert worker[step_id]["execute_model_us"] <= (end_ns - start_ns) / 1e3


def test_sigkill_tears_at_most_a_line(processes):
    process = processes["killed"]
    eventually(lambda: all(len(lines) > 102 for lines in so_far(process.records)), 300)
    (pid,) = process.process.pids()
    os.kill(pid, signal.SIGKILL)
    assert process.process.wait(120) != 0
    life = only_life(process.records)
    assert sorted(path.stem for path in life.iterdir()) == FILES
    for name in ("engine_step", "worker_step.r0"):
        text = (life / f"{name}.jsonl").read_bytes()
        whole, _, _torn = text.rpartition(b"\n")
        _, *lines = map(json.loads, whole.splitlines())
        assert len(lines) > 100
        assert [line["step_id"] for line in lines] == list(range(len(lines)))


def so_far(folder: Path) -> list[list[bytes]]:
    """The lines of the steps' files, as far as there are any."""
    names = ("engine_step", "worker_step.r0")
    files = [path for name in names for path in folder.rglob(f"{name}.jsonl")]
    return [path.read_bytes().splitlines() for path in files] or [[]]
