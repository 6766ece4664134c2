# SPDX-License-Identifier: Apache-2.0
"""Small experiments on stand-ins, for tests that change one thing in them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.standin.process import standin

from kvtax_fleet.experiment.config import Arm, Experiment, Given, Workload
from kvtax_fleet.instances import write_instances
from kvtax_fleet.records.instances import Instance

SMOKE = """
summary = "the experiment itself, on two stand-ins, in seconds"
instances = 2
concurrency = [2]
repeats = 1
baseline = "linear"

[given]
file = "FILE"
restart = ["RESTART"]

[workload]
trace = "traces/claude_code_sessions_le62k.jsonl.xz"
sessions = 10
max_turns = 3
max_output_tokens = 8
max_think_s = 0

[arms.linear]
policy = "linear"

[arms.round_robin]
policy = "round_robin"

[arms.linear_again]
policy = "linear"
"""
# Tests share their machine, so that whether it kept up is not for them to say.
OF_THE_MACHINE = ("the machine did not keep up", "requests were sent late")


def smoke_of(arms: int) -> str:
    """The smoke experiment with its first so many arms; it has no A/A pair."""
    return "[arms.".join(SMOKE.split("[arms.")[: 1 + arms])


@contextmanager
def on_standins(folder: Path, text: str) -> Iterator[Path]:
    """Write the experiment's file; its two stand-ins run inside the context."""
    config, file = folder / "experiment.toml", folder / "instances.json"
    with standin() as one, standin() as two:
        write_instances(file, [Instance("i0", one.url), Instance("i1", two.url)])
        command = [sys.executable, "-m", "tests.harness.standin.process"]
        restart = ", ".join(f'"{word}"' for word in [*command, one.url, two.url])
        text = text.replace("FILE", str(file)).replace('"RESTART"', restart)
        config.write_text(text)
        yield config


def experiment(**changes) -> Experiment:
    arms = {"a": Arm("linear"), "b": Arm("round_robin"), "again": Arm("linear")}
    fields = {
        "summary": "x",
        "workload": Workload("t"),
        "arms": arms,
        "baseline": "a",
        "given": Given("instances.json", ["true"]),
    }
    return Experiment(**(fields | changes))
