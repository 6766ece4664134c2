# SPDX-License-Identifier: Apache-2.0
"""Exposed work of the host: the device had to wait for it.

A device is idle from the end of a forward to the launch of the next. What of the host's
work users wait for is what the device waited for, so of each part this asks: how much
less idle would the device have been, had that part taken no time?

That is what the part took since the host was last held up by the device, and never more
than the device was idle. Work before the host waited for a result is hidden: without
it, the host would have waited longer. Where steps overlap and the host is the slower
of the two, it never waits, and all of its work since the launch before counts. Of two
parts either alone may explain the same gap, so parts do not add up to it.

When a call was made within schedule(), the worker or update_from_output() is not
recorded, only how long it took. So each is taken to be spread evenly over the stretch
of its side in which vLLM makes it: before the launch or after it, in schedule() or in
the update.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from kvtax.records.steps import DeviceStep
from kvtax.steps.parts import method_columns

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# What vLLM calls after the forward is launched, and in update_from_output().
AFTER_LAUNCH = {
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
}
IN_UPDATE = {
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
}


def exposed(steps: pl.DataFrame, device: list[DeviceStep]) -> pl.DataFrame:
    """Make a row per step that ran on the device: us that the device waited, by part.

    `steps` are those of an Instance. Columns: `step_id`; `idle_us`, from the end of the
    forward before to the launch of this one; and of that `exposed.NAME` for
    `scheduler_us` (the host's own), `model_us` (preparing the launch), `connector_us`
    and each method.
    The first forward waited for nothing.
    """
    table = pl.DataFrame(
        {
            "step_id": [step.step_id for step in device],
            "launched_ns": [step.launched_ns for step in device],
            "ended_ns": [step.ended_ns for step in device],
        },
        schema=dict.fromkeys(("step_id", "launched_ns", "ended_ns"), pl.Int64),
    )
    before = table.select(
        "step_id",
        pl.col("ended_ns").shift(1).alias("free_ns"),
        pl.col("launched_ns").shift(1).alias("launched_before_ns"),
    ).drop_nulls()
    rows = (
        steps.select("step_id")
        .join(table, on="step_id", how="inner", maintain_order="left")
        .join(before, on="step_id", how="inner", maintain_order="left")
    )
    launched = rows["launched_ns"].to_numpy()
    idle_us = np.maximum(launched - rows["free_ns"].to_numpy(), 0) / 1e3
    since = (_held_up_until(steps, table, rows), launched)
    parts_us = {"step_id": rows["step_id"], "idle_us": idle_us}
    stretches = _stretches(steps, table)
    methods = method_columns(steps)
    worked_us = _by_part(stretches, methods, steps, since)
    if methods:
        worked_us["connector_us"] = np.sum([worked_us[n] for n in methods], axis=0)
    for name, us in worked_us.items():
        parts_us[f"exposed.{name}"] = np.minimum(us, idle_us)
    return pl.DataFrame(parts_us)


def _held_up_until(
    steps: pl.DataFrame, device: pl.DataFrame, rows: pl.DataFrame
) -> Ints:
    """Since when the host has worked on each launch, in ns.

    Since the launch before, or since the end of the forward whose result it took up in
    between, if that was later.
    """
    updated = steps.select("step_id", "end_ns").join(
        device, on="step_id", how="inner", maintain_order="left"
    )
    ends = updated["end_ns"].to_numpy()
    results = np.append(updated["ended_ns"].to_numpy(), 0)
    before = rows["launched_before_ns"].to_numpy()
    last = np.searchsorted(ends, rows["launched_ns"].to_numpy(), "right") - 1
    taken_up = np.append(ends, 0)[last] > before
    since: Ints = np.maximum(before, np.where(taken_up, results[last], 0))
    return since


def _stretches(
    steps: pl.DataFrame, device: pl.DataFrame
) -> dict[str, tuple[Ints, Ints]]:
    """When each stretch of each step began and ended: by name, in ns, (steps,) each."""
    joined = steps.join(device, on="step_id", how="left", maintain_order="left")
    begun = joined["t_ns"].to_numpy()
    schedule = begun + _ns(joined, "schedule_us")
    worker = joined["worker_t_ns"].fill_null(strategy="backward").to_numpy()
    worker_end = worker + _ns(joined, "execute_model_us")
    launched = joined["launched_ns"].fill_null(0).to_numpy()
    launched = np.clip(launched, worker, worker_end)
    ended = joined["end_ns"].to_numpy()
    return {
        "schedule": (begun, schedule),
        "before_launch": (worker, launched),
        "after_launch": (launched, worker_end),
        "update": (ended - _ns(joined, "update_us"), ended),
    }


def _ns(steps: pl.DataFrame, column: str) -> Ints:
    return (steps[column].fill_null(0).to_numpy().astype(float) * 1e3).astype(np.int64)


def _by_part(
    stretches: dict[str, tuple[Ints, Ints]],
    methods: list[str],
    steps: pl.DataFrame,
    spans: tuple[Ints, Ints],
) -> dict[str, Floats]:
    """us of each part in each span of time, (spans,)."""
    by_part: dict[str, Floats] = {}
    for stretch, (begin, end) in stretches.items():
        long_us = np.maximum(end - begin, 0) / 1e3
        inside = {m: steps[m].to_numpy() for m in methods if _stretch_of(m) == stretch}
        called = sum(inside.values(), np.zeros(len(begin)))
        # Calls between two steps are in no stretch, and cannot fill more than one.
        scale = np.minimum(1, long_us / np.maximum(called, 1e-9))
        own = "scheduler_us" if stretch in ("schedule", "update") else "model_us"
        shares = {name: us * scale for name, us in inside.items()}
        shares[own] = long_us - called * scale
        for name, us in shares.items():
            per_ns = np.divide(
                us * 1e3, end - begin, where=end > begin, out=np.zeros(len(us))
            )
            taken = _overlap(begin, end, per_ns, spans) / 1e3
            by_part[name] = by_part.get(name, np.zeros(len(taken))) + taken
    return by_part


def _stretch_of(method: str) -> str:
    side, _, name = method.removesuffix("_us").partition(".")
    name = name.rpartition(".")[2]
    if side == "scheduler":
        return "update" if name in IN_UPDATE else "schedule"
    return "after_launch" if name in AFTER_LAUNCH else "before_launch"


def _overlap(
    begin: Ints, end: Ints, per_ns: Floats, spans: tuple[Ints, Ints]
) -> Floats:
    """ns of work in each span: intervals in order that do not overlap, `per_ns` of each
    is the work's."""
    edges: Ints = np.empty(2 * len(begin), np.int64)
    edges[::2], edges[1::2] = begin, np.maximum(end, begin)
    edges = np.maximum.accumulate(edges)
    work = np.zeros(len(edges))
    work[1::2] = (edges[1::2] - edges[::2]) * per_ns
    done = np.cumsum(work)
    first = edges[0] if len(edges) else 0
    low, high = (
        np.interp((side - first).astype(float), (edges - first).astype(float), done)
        for side in spans
    )
    inside: Floats = np.maximum(high - low, 0)
    return inside
