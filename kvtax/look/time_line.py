# SPDX-License-Identifier: Apache-2.0
"""A server over time: its steps in intervals, and the requests that waited most."""

from __future__ import annotations

import polars as pl

from kvtax.look.clients import on_the_way_us
from kvtax.look.digest import SUMS
from kvtax.look.discover import Clock
from kvtax.look.instance_summary import waited_most
from kvtax.look.instances import Instance
from kvtax.look.requests import TIMED_PARTS, WAITS
from kvtax.look.tables import part_name
from kvtax.report.document import Cell, Gauge, Requests, TimeLine
from kvtax.steps.parts import STEP_PARTS

# Methods with a layer of their own in the figure.
OWN_LAYER = 4
# Per interval on average, so that few are empty while the server works.
FEWEST_STEPS = 10


def time_line(
    instance: Instance, clock: Clock, intervals: int, most_requests: int
) -> TimeLine:
    """Means over equal intervals of time, each with its slowest step."""
    digest = instance.digest
    begin_ns, end_ns = digest.begin_ns, digest.end_ns
    intervals = max(min(intervals, digest.steps // FEWEST_STEPS), 1)
    width_ns = max((end_ns - begin_ns) // intervals, 1)
    layers = _layers(instance)
    everything = ["model_us", "scheduler_us", "other_us", *instance.methods]
    weight = pl.col("weight").sum()
    used = pl.lit(digest.most_free_blocks) - pl.col("free_blocks")
    gauges = {
        "|cache|, blocks": pl.col("cache_size"),
        "blocks in use": used,
        "running": pl.col("running"),
        "waiting": pl.col("waiting"),
    }
    slowest = [n for n in digest.stretches.columns if n.startswith("slowest.")]
    interval = ((pl.col("t_ns") - begin_ns) // width_ns).alias("interval")
    means = digest.stretches.group_by(interval, maintain_order=True).agg(
        pl.col("steps").sum(),
        *(
            pl.when(weight > 0).then(us.sum() / weight).alias(f"layer.{name}")
            for name, us in layers.items()
        ),
        *(of.mean().alias(f"gauge.{name}") for name, of in gauges.items()),
        pl.col(slowest).sort_by("slowest.step_us", descending=True).first(),
    )
    last = (end_ns - begin_ns) // width_ns
    since_ns = clock.since_zero_ns(instance.name, begin_ns)
    every = pl.DataFrame({"interval": pl.int_range(last + 1, eager=True)})
    rows = every.join(means, on="interval", how="left", maintain_order="left")

    def numbers(column: str) -> list[float | None]:
        return rows[column].cast(pl.Float64).round(1).to_list()

    return TimeLine(
        title="Each moment",
        note=f"{digest.steps:,} steps in intervals of {width_ns / 1e9:,.3f} s, from "
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
    """Choose the stacked layers, lowest first: the connector lies on the model."""
    sums = instance.digest.all.sums
    methods = sorted(instance.methods, key=lambda name: -sums.get(name, 0.0))
    own, rest = methods[:OWN_LAYER], methods[OWN_LAYER:]

    def us(name: str) -> pl.Expr:
        return pl.col(f"{SUMS}{name}").fill_null(0)

    layers = {"model": us("model_us"), "scheduler": us("scheduler_us")}
    layers |= {part_name(name): us(name) for name in own}
    if rest:
        layers["other calls of the connector"] = pl.sum_horizontal(map(us, rest))
    return layers | {"other": us("other_us")}


def _requests(instance: Instance, clock: Clock, most: int) -> Requests | None:
    """Select requests: of too many, those that waited longest for the connector."""
    requests = instance.requests
    if not requests.height:
        return None
    shown = waited_most(requests, most)

    def ms(column: str) -> list[Cell]:
        if column not in shown.columns:
            return [None] * shown.height
        return (shown[column] / 1e3).round(3).to_list()

    def seconds(column: str) -> list[float]:
        moved_ns = clock.since_zero_ns(instance.name, 0)
        return ((shown[column] + moved_ns) / 1e9).round(6).to_list()

    connector, *others = TIMED_PARTS
    parts = (connector, *WAITS, *others)
    columns: dict[str, list[Cell]] = {
        f"{_wait_name(part)} ms": ms(f"e2e.{part}") for part in (*parts, "other_us")
    }
    columns |= {
        "E2E ms": ms("e2e_us"),
        "TTFT ms": ms("ttft_us"),
        "TPOT ms": ms("tpot_us"),
        "connector in TTFT ms": ms("ttft.connector_us"),
    }
    for fact in ("prompt_tokens", "cached_tokens", "external_tokens", "output_tokens"):
        columns[fact.replace("_", " ")] = shown[fact].to_list()
    columns["first step"] = shown["first_step"].to_list()
    columns["last step"] = shown["last_step"].to_list()
    columns["preemptions"] = shown["preemptions"].to_list()
    columns["ended by"] = shown["finish_reason"].to_list()
    if "client_e2e_us" in shown.columns:
        shown = shown.with_columns(on_the_way_us("e2e").alias("way_us"))
        columns |= {
            "client's id": shown["client_id"].to_list(),
            "client's E2E ms": ms("client_e2e_us"),
            "client's TTFT ms": ms("client_ttft_us"),
            "before the engine ms": ms("before_engine_us"),
            "on the way ms": ms("way_us"),
        }
    columns |= {
        f"{name.removesuffix('_us')} ms": ms(f"e2e.{name}") for name in instance.methods
    }
    return Requests(
        total=instance.all_requests,
        ids=shown["id"].to_list(),
        arrival_s=seconds("arrival_ns"),
        end_s=seconds("end_ns"),
        columns=columns,
    )


def _wait_name(part: str) -> str:
    names = {"queued_us": "queued", "kv_wait_us": "waiting for KV"}
    return names.get(part) or STEP_PARTS[part]
