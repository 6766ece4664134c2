# SPDX-License-Identifier: Apache-2.0
"""What a request takes outside of the engine, from a run in real time.

Only requests that came to an idle engine tell: others waited for the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lab.records import RecordsError
from lab.records.engine_requests import ids_of_completion, read_engine_requests
from lab.records.host_times import RequestTime, RequestTimes
from lab.records.lines import read_lines
from lab.records.replay import ReplayedRequest, ReplayEnd, ReplayHeader
from lab.records.step_table import read_steps
from lab.records.steps import EngineHeader

# The slowest tenth of the requests met something else.
USUAL = 0.9


def request_times(run_dir: Path) -> RequestTimes:
    """From all runs below `run_dir`. Raises RecordsError."""
    found = [
        one
        for path in sorted(run_dir.rglob("engine_request.jsonl"))
        for one in _outside(path.parent)
    ]
    if len(found) < 2:
        raise RecordsError(f"{run_dir}: no records of requests that met an idle engine")
    prompt_tokens, to_us, from_us = np.array(found).T
    return RequestTimes(_line(prompt_tokens, to_us), _line(prompt_tokens, from_us))


def _outside(instance: Path) -> Iterator[tuple[int, float, float]]:
    """(prompt tokens, us to the engine, us from it to the client's first token)."""
    steps = read_steps(
        instance / "engine_step.jsonl", EngineHeader, ("step_id", "t_ns", "step_us")
    ).frame.sort("step_id")
    began_ns = steps["t_ns"].to_numpy()
    ended_ns = began_ns + steps["step_us"].to_numpy() * 1e3
    requests = read_engine_requests(instance / "engine_request.jsonl")
    hashed = requests.header is None or requests.header.ids == "hashed"
    lines = read_lines(
        instance.parents[1] / "replay.jsonl", ReplayHeader, ReplayedRequest | ReplayEnd
    )
    sent = {
        ids_of_completion(one.id)[hashed]: one
        for one in lines.records
        if isinstance(one, ReplayedRequest) and one.status == "ok"
    }
    for one in requests.records:
        client = sent.get(one.id)
        before = int(np.searchsorted(began_ns, one.arrival_ns)) - 1
        if client is None or (before >= 0 and one.arrival_ns < ended_ns[before]):
            continue
        yield (
            one.prompt_tokens,
            (one.arrival_ns - client.sent_ns) / 1e3,
            (client.first_token_ns - ended_ns[one.first_token_step]) / 1e3,
        )


def _line(prompt_tokens: np.ndarray, us: np.ndarray) -> RequestTime:
    usual = us <= np.quantile(us, USUAL)
    slope, base = np.polyfit(prompt_tokens[usual] / 1e3, us[usual], 1)
    return RequestTime(
        round(max(0.0, float(base)), 1), round(max(0.0, float(slope)), 2)
    )
