# SPDX-License-Identifier: Apache-2.0
"""What each recorded forward computed, and how long it took: from a server's records.

A step's record counts its tokens, and not what they attend to. That follows from the
records of its requests: each decode adds one token per step, and prompts are computed
in the order in which they began. A step for which the counts do not come out is left
out, and so are steps with a request that was preempted and begins again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from lab.records import RecordsError
from lab.records.engine_requests import EngineRequest, read_engine_requests
from lab.records.lines import read_header
from lab.records.step_table import read_steps
from lab.records.steps import EngineHeader
from lab.stats.estimate import Floats

TIMES = ("t_ns", "schedule_us", "step_us", "update_us")
COUNTS = ("prefill_tokens", "decode_tokens")


@dataclass(frozen=True)
class Forwards:
    """Arrays of one length, in order of time; `of_steps` had tokens.

    `attended_tokens`: the positions of a forward's tokens, summed up.
    """

    tokens: Floats
    attended_tokens: Floats
    took_us: Floats
    of_steps: int


def read_forwards(folder: Path) -> Forwards:
    """Of the server whose records are in `folder`. Raises RecordsError."""
    steps = _read_steps(folder / "engine_step.jsonl")
    requests = read_engine_requests(folder / "engine_request.jsonl").records
    known = _Known(steps)
    for one in sorted(requests, key=lambda one: (one.first_step or 0, one.arrival_ns)):
        known.add(one)
    explained = known.explained()
    tokens = (steps["prefill_tokens"] + steps["decode_tokens"]).to_numpy()
    return Forwards(
        tokens=tokens[explained].astype(float),
        attended_tokens=known.attended[explained],
        took_us=_took_us(steps)[explained],
        of_steps=len(tokens),
    )


def _read_steps(path: Path) -> pl.DataFrame:
    """The steps that had tokens, in order of time."""
    if (every := read_header(path, EngineHeader).every) != 1:
        raise RecordsError(
            f"{path} has one step of {every}, and all are needed: unset "
            "KVTAX_STEP_RECORDS_EVERY"
        )
    columns = ("step_id", *TIMES, *COUNTS)
    steps = read_steps(path, EngineHeader, columns).frame
    for name in (*TIMES, *COUNTS):
        if name != "update_us" and steps[name].null_count():
            raise RecordsError(f"{path} has steps without {name}")
    steps = steps.with_columns(pl.col("update_us").fill_null(0))
    return steps.filter(pl.col("prefill_tokens") + pl.col("decode_tokens") > 0)


def _took_us(steps: pl.DataFrame) -> Floats:
    """From when the device could begin a step to when its outputs were there.

    With asynchronous scheduling a step is scheduled while the one before still runs.
    """
    t_ns, *times = (steps[name].to_numpy() for name in TIMES)
    schedule_us, step_us, update_us = (one.astype(float) for one in times)
    began_us = (t_ns - t_ns[:1]) / 1e3
    done_us = began_us + step_us - update_us
    before_us = np.concatenate([[0.0], done_us[:-1]])
    return done_us - np.maximum(before_us, began_us + schedule_us)


class _Known:
    """Adds up, by step, what its requests are known to have computed in it."""

    def __init__(self, steps: pl.DataFrame) -> None:
        self.attended = np.zeros(len(steps))
        self._rows = {step: row for row, step in enumerate(steps["step_id"])}
        self._t_ns = steps["t_ns"].to_numpy()
        self._prefill_left = steps["prefill_tokens"].to_numpy().astype(int)
        self._decodes_left = steps["decode_tokens"].to_numpy().astype(int)
        self._unclear = np.zeros(len(steps), bool)

    def explained(self) -> np.ndarray:
        """[steps] bool: each token of the step is accounted for."""
        return ~self._unclear & (self._prefill_left == 0) & (self._decodes_left == 0)

    def add(self, request: EngineRequest) -> None:
        """Requests come in the order in which their prompts were begun."""
        named = request.first_step, request.first_token_step, request.last_step
        first, token, last = (self._rows.get(step) for step in named)
        if first is None and last is None:
            return
        if None in (first, token, last):
            self._unclear[first : self._end(request, last)] = True
            return
        self._prefill(request, first, token)
        self._decode(request, token, last)

    def _end(self, request: EngineRequest, last: int | None) -> int | None:
        """The row after its last; None if it did not end."""
        if last is not None:
            return last + 1
        if request.finished_ns is None:
            return None
        return int(np.searchsorted(self._t_ns, request.finished_ns))

    def _prefill(self, request: EngineRequest, first: int, token: int) -> None:
        at = (request.cached_tokens or 0) + (request.external_tokens or 0)
        for row in range(first, token + 1):
            count = min(request.prompt_tokens - at, self._prefill_left[row])
            self._prefill_left[row] -= count
            self.attended[row] += count * at + count * (count - 1) / 2
            at += count
        if at != request.prompt_tokens or request.preemptions:
            self._unclear[first : token + 1] = True

    def _decode(self, request: EngineRequest, token: int, last: int) -> None:
        rows = slice(token + 1, last + 1)
        if last - token != request.output_tokens - 1:
            self._unclear[rows] = True
            return
        self._decodes_left[rows] -= 1
        self.attended[rows] += request.prompt_tokens + np.arange(last - token)
