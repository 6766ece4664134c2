# SPDX-License-Identifier: Apache-2.0
"""Which part of the host's work the device had to wait for.

A device is idle from the end of a forward to the launch of the next. Work of the host
in that time is exposed: users wait for it. Work while the device computes is hidden. So
a part of a step is exposed as far as it lies in such a gap.

When a call was made within schedule(), the worker or update_from_output() is not
recorded, only how long it took. So each is taken to be spread evenly over the stretch
of its side in which vLLM makes it: before the launch or after it, in schedule() or in
the update.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from lab.records.device import DeviceStep
from lab.records.joined_steps import method_columns
from lab.stats.estimate import Floats, Ints

# What vLLM calls after the forward is launched, and in update_from_output().
AFTER_LAUNCH = {
    "wait_for_layer_load",
    "save_kv_layer",
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
STRETCHES = ("schedule", "before_launch", "after_launch", "update")


def exposed(steps: pl.DataFrame, device: list[DeviceStep]) -> pl.DataFrame:
    """A row per step that ran on the device: us that the device waited, by part.

    `steps` are those of an Instance. Columns: `step_id`; `idle_us`, from the end of the
    forward before to the launch of this one; of that, `exposed.NAME` for `scheduler_us`
    (the host's own), `model_us` (preparing the launch) and each method, in which the
    host worked; the rest nobody worked in. The first forward waited for nothing.
    """
    table = pl.DataFrame(
        {
            "step_id": [one.step_id for one in device],
            "launched_ns": [one.launched_ns for one in device],
            "free_ns": [one.ended_ns for one in device],
        },
        schema=dict.fromkeys(("step_id", "launched_ns", "free_ns"), pl.Int64),
    ).with_columns(pl.col("free_ns").shift(1))
    rows = steps.join(table, on="step_id", how="inner").drop_nulls("free_ns")
    gap = (rows["free_ns"].to_numpy(), rows["launched_ns"].to_numpy())
    stretches = _stretches(steps, table)
    told = {"step_id": rows["step_id"], "idle_us": np.maximum(gap[1] - gap[0], 0) / 1e3}
    for name, us in _by_part(stretches, method_columns(steps), steps, gap).items():
        told[f"exposed.{name}"] = us
    return pl.DataFrame(told)


def exposed_per_step(steps: pl.DataFrame, device: list[DeviceStep]) -> dict[str, float]:
    """Mean us per step that the device waited, by part; empty without a device."""
    if not device:
        return {}
    table = exposed(steps, device)
    return {
        name.removeprefix("exposed."): float(table[name].mean() or 0)
        for name in table.columns
        if name.startswith("exposed.")
    }


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
    gap: tuple[Ints, Ints],
) -> dict[str, Floats]:
    """us of each part in each gap, (gaps,)."""
    found: dict[str, Floats] = {}
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
            taken = _overlap(begin, end, per_ns, gap) / 1e3
            found[name] = found.get(name, np.zeros(len(taken))) + taken
    return found


def _stretch_of(method: str) -> str:
    side, _, name = method.removesuffix("_us").partition(".")
    name = name.rpartition(".")[2]
    if side == "scheduler":
        return "update" if name in IN_UPDATE else "schedule"
    return "after_launch" if name in AFTER_LAUNCH else "before_launch"


def _overlap(begin: Ints, end: Ints, per_ns: Floats, gap: tuple[Ints, Ints]) -> Floats:
    """ns of work in each gap: intervals in order that do not overlap, `per_ns` of each
    is the work's."""
    edges = np.empty(2 * len(begin), np.int64)
    edges[::2], edges[1::2] = begin, np.maximum(end, begin)
    edges = np.maximum.accumulate(edges)
    work = np.zeros(len(edges))
    work[1::2] = (edges[1::2] - edges[::2]) * per_ns
    done = np.cumsum(work)
    first = edges[0] if len(edges) else 0
    low, high = (
        np.interp((side - first).astype(float), (edges - first).astype(float), done)
        for side in gap
    )
    return np.maximum(high - low, 0)
