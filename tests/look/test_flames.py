# SPDX-License-Identifier: Apache-2.0
"""A flame graph shows decode-only steps alone, and the us of a step in each call."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvtax.records.stacks import Sample, SampledStacks, SampledThread
from kvtax.report.document import Flame
from tests.look.conftest import main, only, page_data
from tests.look.made_up_server import Server

FRAMES = ["run (core.py:1)", "model (runner.py:1)", "get_finished (nixl.py:1)", "rest"]
RUN, MODEL, GET_FINISHED, REST = range(4)
GET_FINISHED_US = 400.0


def busy(server: Server) -> None:
    """Decode steps, and among them prefills that are longer and call nothing."""
    for number in range(200):
        if number % 5:
            server.step(get_finished_us=GET_FINISHED_US)
        else:
            server.step(model_us=9_000, get_finished_us=0, prefill_tokens=512)


def write_sampled(
    server: Server, every_us: float = 137.0, steps: range | None = None
) -> None:
    """Write the records, and stacks of `steps`, by default all."""
    server.write()
    steps = steps or range(len(server.steps))
    samples, t_ns, step = [], server.steps[steps[0]]["t_ns"] - 10_000, steps[0]
    while t_ns < server.ends_ns(steps[-1]) + 10_000:
        while step + 1 < len(server.steps) and server.steps[step + 1]["t_ns"] <= t_ns:
            step += 1
        samples.append(Sample(t_ns, 1, _doing(server, step, t_ns)))
        samples.append(Sample(t_ns, 0, REST))
        t_ns += round(every_us * 1e3)
    document = SampledStacks(
        pid=11,
        rate_hz=100,
        py_spy="0.4.1",
        threads=[SampledThread(12, "watcher"), SampledThread(11, "MainThread")],
        frames=FRAMES,
        stacks=[[RUN], [RUN, MODEL], [RUN, GET_FINISHED], [REST]],
        samples=samples,
    )
    path = server.folder / "stacks.11.json"
    path.write_bytes(msgspec.json.encode(document))


def _doing(server: Server, step: int, t_ns: int) -> int:
    worker = server.workers[step]
    after_us = (t_ns - worker["t_ns"]) / 1e3
    called_us = worker["connector_us"]["get_finished"]
    if 0 <= after_us < worker["execute_model_us"] - called_us:
        return MODEL
    return GET_FINISHED if 0 <= after_us < worker["execute_model_us"] else RUN


def flames_of(folder: Path) -> tuple[list[Flame], list[str]]:
    instance = only(folder)
    return instance.flames, [one.kind for one in instance.warnings]


def us_of(flame: Flame, thread: str, frame: int) -> float:
    (own,) = (one for one in flame.threads if one.name == thread)
    return sum(
        us for stack, us in zip(own.stacks, own.us, strict=True) if frame in stack
    )


def test_a_call_has_the_us_that_a_decode_step_spends_in_it(server):
    busy(server)
    write_sampled(server)
    (flame,), warnings = flames_of(server.folder)
    assert warnings == []
    step_us = server.steps[1]["step_us"]
    assert us_of(flame, "MainThread", RUN) == pytest.approx(step_us, rel=0.001)
    found_us = us_of(flame, "MainThread", GET_FINISHED)
    assert found_us == pytest.approx(GET_FINISHED_US, rel=0.03)
    assert us_of(flame, "MainThread", MODEL) == pytest.approx(2_000, rel=0.01)
    # The thread of the steps is the first.
    assert [thread.name for thread in flame.threads] == ["MainThread", "watcher"]
    assert us_of(flame, "watcher", REST) == pytest.approx(step_us, rel=0.001)


def test_that_sampling_makes_steps_longer_is_not_what_they_take(server):
    busy(server)
    first = len(server.steps)
    for _ in range(100):
        server.step(
            schedule_us=300,
            model_us=6_000,
            get_finished_us=3 * GET_FINISHED_US,
            update_us=150,
            rest_us=45,
        )
    stopped = range(first, len(server.steps))
    busy(server)
    write_sampled(server, steps=stopped)
    (flame,), _ = flames_of(server.folder)
    step_us = server.steps[1]["step_us"]
    assert us_of(flame, "MainThread", RUN) == pytest.approx(step_us, rel=0.001)
    found_us = us_of(flame, "MainThread", GET_FINISHED)
    assert found_us == pytest.approx(GET_FINISHED_US, rel=0.03)


def test_few_samples_are_doubted_and_none_show_nothing(server):
    busy(server)
    write_sampled(server, every_us=20_000)
    (flame,), warnings = flames_of(server.folder)
    assert warnings == ["few_samples"] and flame.threads
    for step in server.steps:
        step["prefill_tokens"] = 1
    server.write()
    assert flames_of(server.folder) == ([], ["few_samples"])


def test_a_file_of_stacks_that_cannot_be_read_is_named_and_hides_nothing(server):
    busy(server)
    write_sampled(server)
    (server.folder / "stacks.99.json").write_text('{"schema": "kvtax.sampled_st')
    flames, warnings = flames_of(server.folder)
    assert len(flames) == 1 and warnings == ["stacks_unreadable"]


def test_the_page_has_it(server, tmp_path, capsys):
    busy(server)
    write_sampled(server)
    out = tmp_path / "report.html"
    assert main([str(server.folder), "--out", str(out)]) == 0
    kinds = [section["kind"] for section in page_data(out)["sections"]]
    assert kinds.count("flame") == 1
