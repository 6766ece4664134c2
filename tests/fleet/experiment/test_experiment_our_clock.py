# SPDX-License-Identifier: Apache-2.0
"""Records from another host come by our clock, and are otherwise as they were."""

from __future__ import annotations

import json
from pathlib import Path

from fleet.experiment.our_clock import convert
from lab.hosts.clock import Clock, Reading

AHEAD_NS = 7 * 10**12
LINES = [
    {"schema": "x", "boot_id": "theirs", "began_ns": AHEAD_NS, "began_unix_ns": 5},
    {"t_ns": AHEAD_NS + 1, "step_us": 3.5, "running": 2},
    {"id": "a", "arrival_ns": AHEAD_NS + 2, "kv_wait_ns": [AHEAD_NS + 3, AHEAD_NS + 4]},
    {"id": "b", "intended_ns": AHEAD_NS + 5, "sent_ns": None, "end_ns": AHEAD_NS + 6},
]


def test_moments_are_ours_and_all_else_is_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "instances" / "i0"
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    for name in ("engine_step.jsonl", "engine_step.jsonl.1"):
        (folder / name).write_text(text + '{"t_ns": 12')
    (tmp_path / "gpu.csv").write_text(f"monotonic_ns,gpu\n{AHEAD_NS + 7},0\n")
    (folder / "server.log").write_text("t_ns")
    clock = Clock([Reading(0, AHEAD_NS, 0), Reading(10, AHEAD_NS, 0)])
    convert(tmp_path, clock, "ours")
    for name in ("engine_step.jsonl", "engine_step.jsonl.1"):
        *whole, torn = (folder / name).read_text().split("\n")
        assert torn == '{"t_ns": 12'
        assert list(map(json.loads, whole)) == [
            {"schema": "x", "boot_id": "ours", "began_ns": 0, "began_unix_ns": 5},
            {"t_ns": 1, "step_us": 3.5, "running": 2},
            {"id": "a", "arrival_ns": 2, "kv_wait_ns": [3, 4]},
            {"id": "b", "intended_ns": 5, "sent_ns": None, "end_ns": 6},
        ]
    assert (tmp_path / "gpu.csv").read_text() == "monotonic_ns,gpu\n7,0\n"
    assert (folder / "server.log").read_text() == "t_ns"
    assert not list(tmp_path.rglob("*.partial"))
