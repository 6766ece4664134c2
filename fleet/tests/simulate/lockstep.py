# SPDX-License-Identifier: Apache-2.0
"""Feeds a virtual engine what a real one was given, step by step.

    python lockstep.py TOLD.json

Run on the real server's vLLM, whose patches write the same records of it. TOLD has the
server's `arguments`, its `records`, the `trace` that was replayed, and `vocab_size`.
"""

from __future__ import annotations

import json
import sys
from multiprocessing.util import _run_finalizers
from pathlib import Path

from kvtax.records.files import read_lines
from kvtax.records.requests import read_engine_requests
from kvtax.records.steps import EngineHeader, EngineStep, only_life

from kvtax_fleet.replay.sessions import asked_output_tokens
from kvtax_fleet.simulate.cost import Step
from kvtax_fleet.simulate.virtual_engine import VirtualEngine
from kvtax_fleet.trace import read_trace
from kvtax_fleet.trace.prompts import prompt


class NoTime:
    def host_ns(self, step: Step) -> int:
        return 0

    def device_ns(self, step: Step) -> int:
        return 0


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    records = only_life(Path(settings["records"]))
    steps = read_lines(records / "engine_step.jsonl", EngineHeader, EngineStep).records
    requests = read_engine_requests(records / "engine_request.jsonl").records
    waiting = sorted(requests, key=lambda request: request.arrival_ns)
    asked = {
        f"cmpl-{request.session}/{request.turn}-0": request
        for request in read_trace(settings["trace"])
    }
    engine = VirtualEngine(settings["arguments"], NoTime(), False)
    for step in steps:
        while waiting and waiting[0].arrival_ns < step.t_ns:
            known = waiting.pop(0).id
            request = asked[known]
            ids = prompt(request, settings["vocab_size"]).tolist()
            # vLLM adds eight digits, which the records leave out.
            engine.add(f"{known}-00000000", ids, asked_output_tokens(request), None)
        engine.step()
    assert not engine.has_work
    _run_finalizers()


if __name__ == "__main__":
    main()
