# SPDX-License-Identifier: Apache-2.0
"""What a device waits for is exposed, what happens while it computes is hidden."""

from __future__ import annotations

from itertools import pairwise

import pytest
from made_up_server import Server

from lab.records.device import DeviceStep
from look.exposed import exposed
from look.instances import read_instances

META, FINISHED = "scheduler.build_connector_meta_us", "worker.get_finished_us"


def parts(server: Server, device: list[DeviceStep]) -> list[dict[str, float]]:
    """By step that waited: its idle time and exposed parts."""
    ((instance,), _) = read_instances(server.write())
    return exposed(instance.steps, device).to_dicts()


def one_after_the_other(server: Server, forward_us: int) -> list[DeviceStep]:
    """Steps as without overlap: launch, wait for the end, update."""
    device = []
    for number in range(4):
        server.step(
            10,
            schedule_us=300,
            build_meta_us=120,
            model_us=500 + forward_us,
            get_finished_us=80,
            update_us=70,
            rest_us=0,
        )
        # vLLM launches 500 us after the worker began, and then waits.
        launched_ns = server.workers[-1]["t_ns"] + 500_000
        ended_ns = launched_ns + forward_us * 1_000
        device.append(DeviceStep(number, launched_ns, launched_ns, ended_ns))
    return device


def test_without_overlap_what_the_host_does_between_two_forwards_is_exposed(server):
    found = parts(server, one_after_the_other(server, forward_us=2_000))
    assert [row["step_id"] for row in found] == [1, 2, 3]
    for row in found:
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


def test_time_in_which_nobody_worked_is_idle_and_exposes_nothing(server):
    device = one_after_the_other(server, forward_us=2_000)
    server.step(gap_us=1e6, schedule_us=300, build_meta_us=120)
    launched_ns = server.workers[-1]["t_ns"] + 500_000
    device.append(DeviceStep(4, launched_ns, launched_ns, launched_ns + 10))
    row = parts(server, device)[-1]
    assert row["idle_us"] > 1e6
    told = sum(us for name, us in row.items() if name.startswith("exposed."))
    assert told < 1_000
