# SPDX-License-Identifier: Apache-2.0
"""Work is exposed if a device waited for it, and then no longer than it waited."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvtax.records.steps import DeviceStep
from kvtax.steps.critical_path import exposed
from tests.look.conftest import only
from tests.look.made_up_server import Server

META, FINISHED = "scheduler.build_connector_meta_us", "worker.get_finished_us"


@pytest.fixture
def server(tmp_path) -> Server:
    return Server(tmp_path / "records")


def parts(server: Server, device: list[DeviceStep]) -> list[dict[str, float]]:
    """By step that waited: its idle time and exposed parts."""
    return exposed(only(server.write()).steps, device).to_dicts()


US = {"get_finished_us": 80, "update_us": 70, "rest_us": 0}


def one_after_the_other(server: Server, forward_us: int) -> list[DeviceStep]:
    """Steps as without overlap: launch, wait for the end, update."""
    device = []
    for number in range(4):
        server.step(schedule_us=300, build_meta_us=120, model_us=500 + forward_us, **US)
        # vLLM launches 500 us after the worker began, and then waits.
        launched_ns = server.workers[-1]["t_ns"] + 500_000
        ended_ns = launched_ns + forward_us * 1_000
        device.append(DeviceStep(number, launched_ns, launched_ns, ended_ns))
    return device


def test_without_overlap_what_the_host_does_between_two_forwards_is_exposed(server):
    table = parts(server, one_after_the_other(server, forward_us=2_000))
    assert [row["step_id"] for row in table] == [1, 2, 3]
    for row in table:
        assert row["idle_us"] == pytest.approx(80 + 70 + 10 + 300 + 500, abs=1)
        assert row[f"exposed.{META}"] == pytest.approx(120, abs=1)
        assert row["exposed.scheduler_us"] == pytest.approx(180 + 70, abs=1)
        in_worker = row["exposed.model_us"] + row[f"exposed.{FINISHED}"]
        assert in_worker == pytest.approx(500 + 80, abs=1)


def test_with_a_device_that_is_always_busy_nothing_is_exposed(server):
    device = one_after_the_other(server, forward_us=2_000)
    for before, after in pairwise(device):
        before.ended_ns = after.began_ns = after.launched_ns + 5_000
    for row in parts(server, device):
        assert all(us == 0 for name, us in row.items() if name != "step_id")


def test_of_a_shorter_gap_only_what_lies_in_it_is_exposed(server):
    device = one_after_the_other(server, forward_us=2_000)
    # The device is free again only when schedule() of the next step is half done.
    for before, step in zip(device, server.steps[1:], strict=False):
        before.ended_ns = step["t_ns"] + 150_000
    for row in parts(server, device):
        assert row["idle_us"] == pytest.approx(150 + 500, abs=1)
        assert row[f"exposed.{META}"] == pytest.approx(60, abs=1)
        assert row["exposed.scheduler_us"] == pytest.approx(90, abs=1)
        assert row[f"exposed.{FINISHED}"] == pytest.approx(0, abs=1)


def test_where_the_host_is_slower_than_the_device_all_its_work_counts(server):
    """Two steps in flight: the host takes up a result that was there long ago."""
    device, launched_ns = [], []
    for _ in range(6):
        server.step(0, schedule_us=1_500, build_meta_us=1_200, model_us=500, **US)
        launched_ns.append(server.workers[-1]["t_ns"] + 500_000)
    for number, at_ns in enumerate(launched_ns):
        # A forward takes 1,000 us, and the host 2,150 us per step.
        device.append(DeviceStep(number, at_ns, at_ns, at_ns + 1_000_000))
    # A step ends when its result is taken up, which is a step later.
    for step, later in zip(server.steps, server.steps[1:], strict=False):
        ended_ns = later["t_ns"] + round(later["step_us"] * 1e3)
        step["step_us"] = (ended_ns - step["t_ns"]) / 1e3
        step["update_us"] = 0
    for row in parts(server, device)[1:-1]:
        assert row["idle_us"] == pytest.approx(1_150, abs=1)
        # Without its 1,200 us the device would not have been idle at all.
        assert row[f"exposed.{META}"] == pytest.approx(1_150, abs=1)
        assert row["exposed.scheduler_us"] == pytest.approx(300, abs=80)


def test_time_in_which_nobody_worked_is_idle_and_exposes_nothing(server):
    device = one_after_the_other(server, forward_us=2_000)
    server.step(gap_us=1e6, schedule_us=300, build_meta_us=120)
    launched_ns = server.workers[-1]["t_ns"] + 500_000
    device.append(DeviceStep(4, launched_ns, launched_ns, launched_ns + 10))
    row = parts(server, device)[-1]
    assert row["idle_us"] > 1e6
    assert max(us for name, us in row.items() if name.startswith("exposed.")) < 600
    assert row["exposed.connector_us"] == pytest.approx(
        row[f"exposed.{META}"] + row[f"exposed.{FINISHED}"], abs=0.1
    )
