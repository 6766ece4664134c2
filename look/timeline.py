# SPDX-License-Identifier: Apache-2.0
"""An instance over time, as a page shows it: few intervals, and no outlier lost."""

from __future__ import annotations

import polars as pl

from look.clients import on_the_way_us
from look.clocks import Clock
from look.cost import PARTS
from look.instances import Instance
from look.split import STEP_PARTS, WAITS
from page.document import Gauge, Requests, TimeLine

# Methods with a layer of their own in the figure.
OWN_LAYER = 4
# Per interval on average, so that few are empty while the server works.
FEWEST_STEPS = 10


def time_line(
    name: str, instance: Instance, clock: Clock, intervals: int, most_requests: int
) -> TimeLine:
    """Means over equal intervals of time, each with its slowest step."""
    steps = instance.steps
    begin_ns, end_ns = int(steps["t_ns"][0]), int(steps["end_ns"].max())
    intervals = max(min(intervals, steps.height // FEWEST_STEPS), 1)
    width_ns = max((end_ns - begin_ns) // intervals, 1)
    layers = _layers(instance)
    everything = [*(n for n in PARTS if n != "connector_us"), *instance.methods]
    used = pl.lit(steps["free_blocks"].max()) - pl.col("free_blocks")
    gauges = {
        "|cache|, blocks": pl.col("cache_size"),
        "blocks in use": used,
        "running": pl.col("running"),
        "waiting": pl.col("waiting"),
    }
    interval = ((pl.col("t_ns") - begin_ns) // width_ns).set_sorted()
    found = (
        steps.with_columns(**{f"gauge.{n}": of for n, of in gauges.items()})
        .with_row_index("row")
        .group_by(interval.alias("interval"))
        .agg(
            pl.len().alias("steps"),
            *(of.mean().alias(f"layer.{n}") for n, of in layers.items()),
            pl.col("row").get(pl.col("step_us").arg_max()),
            *(pl.col(f"gauge.{n}").mean() for n in gauges),
        )
    )
    slowest = steps.select("step_id", "step_us", *everything)[found["row"]]
    found = found.hstack(slowest.select(pl.all().name.prefix("slowest.")))
    last = (end_ns - begin_ns) // width_ns
    since_ns = clock.since_zero_ns(instance.name, begin_ns)
    every = pl.DataFrame({"interval": pl.int_range(last + 1, eager=True)})
    rows = every.join(found, on="interval", how="left", maintain_order="left")

    def numbers(column: str) -> list[float | None]:
        return rows[column].cast(pl.Float64).round(1).to_list()

    return TimeLine(
        title=name,
        note=f"{steps.height:,} steps in intervals of {width_ns / 1e9:,.3f} s, from "
        f"the first step of all, {clock.utc}.",
        t_s=[round((since_ns + i * width_ns) / 1e9, 6) for i in range(last + 1)],
        steps=rows["steps"].fill_null(0).to_list(),
        parts={n: numbers(f"layer.{n}") for n in layers},
        slowest_us=numbers("slowest.step_us"),
        slowest_step=rows["slowest.step_id"].to_list(),
        slowest_parts={part_name(n): numbers(f"slowest.{n}") for n in everything},
        gauges=[
            Gauge(name=n, values=numbers(f"gauge.{n}"), of_requests="ing" in n)
            for n in gauges
        ],
        requests=_requests(instance, clock, most_requests),
    )


def _layers(instance: Instance) -> dict[str, pl.Expr]:
    """What is stacked, the lowest first: the connector's methods lie on the model."""
    methods = sorted(instance.methods, key=lambda name: -instance.steps[name].sum())
    own, rest = methods[:OWN_LAYER], methods[OWN_LAYER:]
    layers = {"model": pl.col("model_us"), "scheduler": pl.col("scheduler_us")}
    layers |= {part_name(name): pl.col(name) for name in own}
    if rest:
        layers["other calls of the connector"] = pl.sum_horizontal(rest)
    return layers | {"other": pl.col("other_us")}


def part_name(column: str) -> str:
    return PARTS.get(column, column.removesuffix("_us"))


def _requests(instance: Instance, clock: Clock, most: int) -> Requests | None:
    """Those that waited longest for the connector, where there are too many."""
    requests = instance.requests
    if not requests.height:
        return None
    shown = requests.sort("e2e.connector_us", descending=True).head(most)

    def ms(column: str) -> list[float | None]:
        return (shown[column] / 1e3).round(3).to_list()

    def seconds(column: str) -> list[float]:
        moved_ns = clock.since_zero_ns(instance.name, 0)
        return ((shown[column] + moved_ns) / 1e9).round(6).to_list()

    parts = ("connector_us", *WAITS, *(p for p in STEP_PARTS if p != "connector_us"))
    columns = {
        f"{_wait_name(part)} ms": ms(f"e2e.{part}") for part in (*parts, "other_us")
    }
    columns |= {
        "E2E ms": ms("e2e_us"),
        "TTFT ms": ms("ttft_us"),
        "TPOT ms": ms("tpot_us"),
    }
    columns |= {
        "connector in TTFT ms": ms("ttft.connector_us")
        if "ttft.connector_us" in shown.columns
        else [None] * shown.height
    }
    for fact in ("prompt_tokens", "cached_tokens", "external_tokens", "output_tokens"):
        columns[fact.replace("_", " ")] = shown[fact].to_list()
    columns["preemptions"] = shown["preemptions"].to_list()
    columns["ended by"] = shown["finish_reason"].to_list()
    if "client_e2e_us" in shown.columns:
        shown = shown.with_columns(on_the_way_us("e2e").alias("way_us"))
        columns |= {
            "client's E2E ms": ms("client_e2e_us"),
            "client's TTFT ms": ms("client_ttft_us"),
            "before the engine ms": ms("before_engine_us"),
            "on the way ms": ms("way_us"),
        }
    columns |= {
        f"{name.removesuffix('_us')} ms": ms(f"e2e.{name}") for name in instance.methods
    }
    return Requests(
        total=requests.height,
        ids=shown["id"].to_list(),
        arrival_s=seconds("arrival_ns"),
        end_s=seconds("end_ns"),
        columns=columns,
    )


def _wait_name(part: str) -> str:
    names = {"queued_us": "queued", "kv_wait_us": "waiting for KV"}
    return names.get(part) or PARTS[part]
