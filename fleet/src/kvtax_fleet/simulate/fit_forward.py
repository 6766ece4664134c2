# SPDX-License-Identifier: Apache-2.0
"""Fit a profile's `forward` to the step records of a server: `kvtax fleet forward`.

A step's record counts its tokens, not the tokens that they attend to. These follow from
the records of its requests: each decode adds a token per step, and prompts are computed
in the order in which they begin. Steps whose counts do not add up are left out, and so
are steps with a request that was preempted and begins again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
from kvtax.records import RecordsError
from kvtax.records.files import read_header
from kvtax.records.requests import EngineRequest, read_engine_requests
from kvtax.records.steps import EngineHeader, only_life
from kvtax.stats.distribution import Floats
from kvtax.stats.least_squares import least_relative_error
from kvtax.steps.step_file import read_steps

Flags = npt.NDArray[np.bool_]
NAMES = ("forward_us", "us_per_token", "us_per_context_token")
# Stretches of time, each of which is predicted from the others.
STRETCHES = 10
FEWEST_STEPS = 200


TIMES = ("t_ns", "schedule_us", "step_us", "update_us")
COUNTS = ("prefill_tokens", "decode_tokens")


@dataclass(frozen=True)
class Forwards:
    """Forwards in order of time, of which there were `of_steps`.

    `attended_tokens`: the sum of the positions of a forward's tokens.
    """

    tokens: Floats
    attended_tokens: Floats
    took_us: Floats
    of_steps: int


def read_forwards(folder: Path) -> Forwards:
    """Read the forwards of the server with records in `folder`. Raises RecordsError."""
    life = only_life(folder)
    steps = _read_steps(life / "engine_step.jsonl")
    requests = read_engine_requests(life / "engine_request.jsonl").records
    explanation = _Explanation(steps)
    for each in sorted(
        requests, key=lambda each: (each.first_step or 0, each.arrival_ns)
    ):
        explanation.add(each)
    explained = explanation.explained()
    tokens = (steps["prefill_tokens"] + steps["decode_tokens"]).to_numpy()
    return Forwards(
        tokens=tokens[explained].astype(float),
        attended_tokens=explanation.attended[explained],
        took_us=_took_us(steps)[explained],
        of_steps=len(tokens),
    )


def _read_steps(path: Path) -> pl.DataFrame:
    """Read the steps that had tokens, in order of time."""
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
    """Return the time from when the device could begin a step to its outputs.

    With asynchronous scheduling a step is scheduled while the one before still runs.
    """
    t_ns, *times = (steps[name].to_numpy() for name in TIMES)
    schedule_us, step_us, update_us = (each.astype(float) for each in times)
    began_us = (t_ns - t_ns[:1]) / 1e3
    done_us = began_us + step_us - update_us
    before_us = np.concatenate([[0.0], done_us[:-1]])
    took_us: Floats = done_us - np.maximum(before_us, began_us + schedule_us)
    return took_us


class _Explanation:
    """Sums by step, over requests, the tokens that each has computed in it."""

    def __init__(self, steps: pl.DataFrame) -> None:
        self.attended = np.zeros(len(steps))
        self._rows = {step: row for row, step in enumerate(steps["step_id"])}
        self._t_ns = steps["t_ns"].to_numpy()
        self._prefill_left = steps["prefill_tokens"].to_numpy().astype(int)
        self._decodes_left = steps["decode_tokens"].to_numpy().astype(int)
        self._unclear: Flags = np.zeros(len(steps), bool)

    def explained(self) -> Flags:
        """Return for each step whether each of its tokens is accounted for."""
        all_counted = (self._prefill_left == 0) & (self._decodes_left == 0)
        explained: Flags = ~self._unclear & all_counted
        return explained

    def add(self, request: EngineRequest) -> None:
        """Add a request; requests come in the order in which their prompts begin."""
        named = request.first_step, request.first_token_step, request.last_step
        first, token, last = (self._rows.get(step) for step in named)
        if first is None and last is None:
            return
        if first is None or token is None or last is None:
            self._unclear[first : self._end(request, last)] = True
            return
        self._prefill(request, first, token)
        self._decode(request, token, last)

    def _end(self, request: EngineRequest, last: int | None) -> int | None:
        """Return the row after its last; None if it did not end."""
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


def fitted_table(folder: Path) -> str:
    """Fit to the records in `folder`; return the table. Raises RecordsError."""
    forwards = read_forwards(folder)
    if (count := len(forwards.took_us)) < FEWEST_STEPS:
        raise RecordsError(
            f"{folder}: the tokens of {count} of {forwards.of_steps} steps are known; "
            f"{FEWEST_STEPS} are needed: record for longer, with the patches "
            "step_timing_v2"
        )
    return report(forwards)


def held_out_errors(forwards: Forwards) -> tuple[Floats, float]:
    """Predict each step from other stretches of time.

    Returns the relative errors of the steps, and of all predictions together.
    """
    terms, took_us = _terms(forwards), forwards.took_us
    predicted_us = np.empty_like(took_us)
    for held in np.array_split(np.arange(len(took_us)), STRETCHES):
        others = np.delete(np.arange(len(took_us)), held)
        factors = least_relative_error(terms[others], took_us[others])
        predicted_us[held] = terms[held] @ factors
    together = predicted_us.sum() / took_us.sum() - 1
    return predicted_us / took_us - 1, float(together)


def _terms(forwards: Forwards) -> Floats:
    """Return [steps, 3], by NAMES."""
    ones = np.ones_like(forwards.tokens)
    return np.stack([ones, forwards.tokens, forwards.attended_tokens], axis=1)


def report(forwards: Forwards) -> str:
    """Return the TOML table, with its errors on held-out steps as a comment."""
    errors, together = held_out_errors(forwards)
    middle, most = np.quantile(np.abs(errors), [0.5, 0.9])
    share = len(errors) / forwards.of_steps
    lines = [
        f"# Fitted to {len(errors):,} steps, {share:.1%} of all. Steps held out are",
        f"# predicted within {middle:.1%} (median) and {most:.1%} (p90), all of them "
        f"together to {together:+.1%}.",
        "[forward]",
    ]
    factors = least_relative_error(_terms(forwards), forwards.took_us)
    values = zip(NAMES, factors, strict=True)
    return "\n".join(lines + [f"{name} = {value:.4g}" for name, value in values])
