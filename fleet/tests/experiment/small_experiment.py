# SPDX-License-Identifier: Apache-2.0
"""Small experiments, for tests that change one thing in them.

    python -m fleet.tests.experiment.small_experiment EXPERIMENT.toml --out DIR

is `kvtax fleet` with stand-ins in place of the servers of vLLM. With WARM=1 the second
one has served a request before it is handed over.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.harness.standin.process import standin

from kvtax_fleet.experiment.config import Arm, Experiment, Workload
from kvtax_fleet.launch.launched import LaunchedInstance
from kvtax_fleet.records.instances import Instance

SMOKE = """
summary = "the experiment itself, on two stand-ins, in seconds"
profile = "h20-30b-a3b"
instances = 2
concurrency = [2]
repeats = 1
baseline = "linear"

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


def experiment(**changes) -> Experiment:
    arms = {"a": Arm("linear"), "b": Arm("round_robin"), "again": Arm("linear")}
    fields = {
        "summary": "x",
        "workload": Workload("t"),
        "arms": arms,
        "baseline": "a",
        "profile": "h20-30b-a3b",
    }
    return Experiment(**(fields | changes))


@contextmanager
def launched(spec: Any, _: Any, folder: Path) -> Iterator[list[LaunchedInstance]]:
    """Start a stand-in for each role of `spec`."""
    with ExitStack() as stack:
        servers = [stack.enter_context(standin()) for _ in spec.roles]
        if os.environ.get("WARM"):
            body = b'{"prompt": [1, 2], "max_tokens": 1, "model": "null"}'
            kind = {"Content-Type": "application/json"}
            url = f"{servers[1].url}/v1/completions"
            urllib.request.urlopen(urllib.request.Request(url, body, kind)).read()
        fleet = []
        for place, server in enumerate(servers):
            own = folder / f"i{place}"
            own.mkdir(parents=True)
            process = SimpleNamespace(
                supervised=server.process, is_ready=lambda: True, pss_mib=lambda: 0.0
            )
            instance = Instance(f"i{place}", server.url)
            fleet.append(LaunchedInstance(instance, process, own))  # type: ignore[arg-type]
        yield fleet


def main() -> int:
    """Run the command line's experiment on stand-ins."""
    from kvtax.cli import main as kvtax

    from kvtax_fleet.experiment import executors, fleet

    with (
        mock.patch.object(fleet, "launched", launched),
        mock.patch.object(fleet, "engine_lags", lambda _: {}),
        # The stand-ins' fork server stays.
        mock.patch.object(fleet, "descendants", lambda _: []),
        mock.patch.object(fleet.Workshop, "overlay", lambda *_: (Path(), {})),
        mock.patch.object(executors, "machine_lock", nullcontext),
        mock.patch.object(executors.preflight, "check_machine", lambda *_: None),
    ):
        return kvtax(["fleet", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
