# SPDX-License-Identifier: Apache-2.0
"""Calls of a connector that a record has, and that were made outside of its step.

A record has all calls since the step before ended: the first one those of the engine's
start, a later one those between two steps, as of a request that was aborted. They took
no time of the step, so they count in no part and no share of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from kvtax.records.steps import METHOD_FIELDS
from kvtax.stats.distribution import Floats
from kvtax.steps.parts import CALLS, SIDES, method_columns, step_parts

# What vLLM calls once, before there are steps.
START_METHODS = {
    "bind_gpu_block_pool",
    "get_finished_count",
    "get_handshake_metadata",
    "get_required_kvcache_layout",
    "init_kv_caches",
    "register_cross_layers_kv_cache",
    "register_kv_caches",
    "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata",
}
# What vLLM calls in each step, and never between two.
IN_EACH_STEP = {f"{side}.{name}" for side, of in METHOD_FIELDS.items() for name in of}
# What of a step each side's calls are made in.
SPANS = {"scheduler": ("schedule_us", "update_us"), "worker": ("execute_model_us",)}
# Times are recorded to 0.1 us or better; a step's parts may pass it by rounding.
ROUNDING_US = 1.0


class OutsideCalls(NamedTuple):
    """Steps without the calls outside of them, and the time of these by method, in us.

    `between_us` is a sum over all steps.
    """

    steps: pl.DataFrame
    at_start_us: dict[str, float]
    between_us: dict[str, float]


def without_outside_calls(steps: pl.DataFrame) -> OutsideCalls:
    """Take calls out of `steps` that cannot have been made within.

    Where a side's calls are longer than its own time in the step, and all parts longer
    than the step, its longest calls were made outside: they go, one method after the
    other, until the others fit.
    """
    methods = method_columns(steps)
    if not methods or not steps.height:
        return OutsideCalls(steps, {}, {})
    sides = {side: _excess_us(steps, side) > ROUNDING_US for side in SIDES}
    rows = np.union1d([0], np.flatnonzero(np.any([*sides.values()], axis=0)))
    some = steps[rows].with_columns(pl.col(methods).fill_null(0))
    us = some.select(methods).to_numpy().astype(float)
    outside = np.zeros(us.shape, bool)
    is_start = [_method(name).rpartition(".")[2] in START_METHODS for name in methods]
    outside[0] = is_start & (us[0] > 0)
    for side in (name.partition(".")[0] for name in methods):
        kept_us = np.where(outside, 0, us)
        kept = some.with_columns(pl.DataFrame(kept_us, methods).get_columns())
        over = np.flatnonzero(_excess_us(kept, side) > ROUNDING_US)
        may_be = [
            m.startswith(side) and _method(m) not in IN_EACH_STEP for m in methods
        ]
        longest_us = np.where(may_be, kept_us[over], 0)
        outside[over, longest_us.argmax(axis=1)] |= longest_us.any(axis=1)
    columns = []
    for name, gone in zip(methods, outside.T, strict=True):
        for column in (name, _method(name) + CALLS) if gone.any() else ():
            columns.append(steps[column].clone().scatter(rows[gone], None))
    taken_us = np.where(outside, us, 0)
    at_start_us, between_us = taken_us[0], taken_us[1:].sum(axis=0)
    return OutsideCalls(
        steps.with_columns(columns),
        {
            _method(name): us
            for name, us in zip(methods, at_start_us, strict=True)
            if us
        },
        {_method(name): us for name, us in zip(methods, between_us, strict=True) if us},
    )


def _excess_us(steps: pl.DataFrame, side: str) -> Floats:
    """Compute the time of a side's calls for which there is no room in each step."""
    methods = method_columns(steps)
    calls_us = pl.sum_horizontal(
        pl.lit(0.0), *(pl.col(m).fill_null(0) for m in methods if m.startswith(side))
    )
    spans_us = pl.sum_horizontal(pl.col(name).fill_null(0) for name in SPANS[side])
    no_room_us = -step_parts(methods)["other_us"].fill_null(0)
    excess_us = pl.min_horizontal(calls_us - spans_us, no_room_us)
    return steps.select(excess_us).to_series().to_numpy().astype(float)


def _method(column: str) -> str:
    return column.removesuffix("_us")
