# SPDX-License-Identifier: Apache-2.0
"""The summary of an instance: costs, and what they move with."""

from __future__ import annotations

import functools
import json
import re
import resource
import signal
import subprocess
import sys

import numpy as np
import polars as pl
import pytest

from kvtax.cli import demo
from kvtax.cli import main as main_of_kvtax
from kvtax.cli.look import PAGE
from kvtax.engine.releases import RELEASES_TOML
from kvtax.look.answer import known
from kvtax.look.demo import RECORDS, unpack
from kvtax.look.digest import StepDigest
from kvtax.look.discover import discover
from kvtax.look.instance_summary import (
    COVARIATES,
    cost,
    felt,
    moves,
    parts_of_requests,
    summarise,
)
from kvtax.look.instances import each_instance
from kvtax.patcher import load_patches, load_releases
from kvtax.paths import PATCHES, REPOSITORY
from kvtax.records.warning import RunWarning
from kvtax.stats import Estimate
from kvtax.stats.distribution import t_quantile
from kvtax.stats.least_squares import STRETCHES
from tests.look.conftest import digest_of, main, only
from tests.look.made_up_server import FIRST_NS, Server, served
from tests.proc.living import eventually


@pytest.mark.parametrize("count", [1, 2, 3, 50, 99, 100, 101, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_quantiles_are_within_half_a_percent(count, seed):
    rng = np.random.default_rng(seed)
    us = pl.Series(rng.exponential(50, count).round(1), dtype=pl.Float32)
    digest = digest_of(pl.DataFrame({"model_us": us, **COUNTS}))
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        exact = us.quantile(share)
        assert digest.quantile("model_us", share) == pytest.approx(exact, rel=0.005)


COUNTS = {"cache_size": 1, "running": 1, "free_blocks": 1, "prefill_tokens": 0}


@pytest.mark.parametrize("chunk", [1, 70, 400])
def test_sums_of_chunks_are_those_of_all_steps(chunk):
    rng = np.random.default_rng(chunk)
    us = pl.Series(rng.exponential(50, 400 if chunk > 1 else 40))
    steps = pl.DataFrame({"model_us": us, "step_us": us + 10.0, **COUNTS}).with_columns(
        step_id=pl.int_range(pl.len()),
        t_ns=1_000 * pl.int_range(pl.len()),
        end_ns=1_000 * pl.int_range(1, pl.len() + 1),
    )
    whole, parts = digest_of(steps), StepDigest()
    for first in range(0, steps.height, chunk):
        parts.add(filled(steps[first : first + chunk]))
    assert parts.steps == whole.steps == len(us)
    assert parts.all.mean("model_us") == pytest.approx(us.mean())
    assert parts.quantile("model_us", 0.99) == whole.quantile("model_us", 0.99)


@pytest.mark.parametrize("at", [0, pytest.param(500, marks=pytest.mark.slow)])
def test_a_long_step_moves_no_mean_and_is_named(tmp_path, at, capsys):
    server = served(tmp_path / "r", 1_000)
    before = cost(only(server.write()))
    server.steps[at]["step_us"] = 60e6
    if at == 0:
        server.steps[at]["t_ns"] -= 60 * 10**9
    instance = only(server.write())
    after = cost(instance)
    assert after.connector.share == pytest.approx(before.connector.share, rel=0.1)
    assert after.step.mean_us == pytest.approx(before.step.mean_us, rel=0.1)
    assert [step.step_id for step in instance.digest.longest] == [at]
    main([str(server.folder)])
    assert f"the longest is step {at}, 60.0 s" in capsys.readouterr().out


def test_a_part_is_told_as_its_steps_were(records):
    instance = only(records)
    summary = cost(instance)
    for part in (summary.step, *summary.parts, *summary.methods):
        us = instance.steps[part.column]
        assert part.mean_us == pytest.approx(us.mean())
        assert part.most_us == us.max()
        exact = pytest.approx((us.quantile(0.5), us.quantile(0.99)), rel=0.005)
        assert (part.p50_us, part.p99_us) == exact


def test_each_method_and_their_sum_have_slopes(tmp_path):
    instance = only(served(tmp_path / "records", 2_500).write())
    summary = summarise(instance)
    assert list(summary.slopes) == ["connector_us", *instance.methods]
    whole = summary.slopes["connector_us"]["cache"].value
    parts = [summary.slopes[name]["cache"].value for name in instance.methods]
    assert sum(parts) == pytest.approx(whole, abs=1e-4)


def filled(steps: pl.DataFrame) -> pl.DataFrame:
    """Add what a digest needs beside."""
    return steps.with_columns(
        execute_model_us=pl.lit(1.0),
        alone_us=pl.lit(1.0),
        followed_us=pl.lit(1.0),
        scheduled=pl.lit(1),
        waiting=pl.lit(0),
        scheduler_us=pl.lit(1.0),
        connector_us=pl.lit(1.0),
        other_us=pl.lit(1.0),
    )


@pytest.fixture
def three(tmp_path):
    for name in "abc":
        served(tmp_path / name, steps=50).write()
    return tmp_path


def test_one_bad_instance_is_a_warning_in_its_place(three):
    with (three / "b" / "engine_step.jsonl").open("a") as file:
        for step_id in range(11):
            file.write(f'{{"step_id": {step_id}, "t_ns": 1}}\n')
    discovered, _ = discover(three)
    first, bad, last = each_instance(discovered)
    assert (first.name, last.name) == ("a", "c")
    assert isinstance(bad, RunWarning)
    assert "two processes wrote this file" in bad.message


def traffic(rng: np.random.Generator, steps: int = 20_000) -> pl.DataFrame:
    """A day in small: load goes up and down, and the cache fills and is reset."""
    moment = np.arange(steps) / steps
    running = np.clip(12 + 8 * np.sin(14 * moment) + rng.normal(0, 2, steps), 1, None)
    used = 40 * running + 600 * np.sin(23 * moment + 1) + 700
    return pl.DataFrame(
        {
            "cache_size": (12_000 * ((3 * moment) % 1)).astype(int),
            "running": running.astype(int),
            "free_blocks": (20_000 - used).astype(int),
            "prefill_tokens": np.where(rng.random(steps) < 0.05, 2_000, 0),
        }
    )


def noise(rng: np.random.Generator, steps: int) -> np.ndarray:
    """us, remembered over some hundred steps, with stalls."""
    shocks = rng.normal(0, 3, steps)
    slow = np.convolve(shocks, np.exp(-np.arange(300) / 100), "same")
    return slow / 5 + rng.exponential(5, steps) + 300 * (rng.random(steps) < 0.001)


def moved(steps: pl.DataFrame) -> dict[str, Estimate | str]:
    """What the column `us` moved with."""
    digest = digest_of(steps.rename({"us": COLUMN}))
    return moves(digest, [COLUMN])[COLUMN]


COLUMN = "scheduler.made_up_us"


@pytest.mark.parametrize(
    ("axis", "column", "per"),
    [("cache", "cache_size", 1_000), ("running", "running", 1)],
)
def test_a_slope_is_found_on_its_axis_and_not_on_the_others(axis, column, per):
    rng = np.random.default_rng(3)
    steps = traffic(rng)
    us = 10 + 4.0 * steps[column] / per + noise(rng, steps.height)
    covariates = moved(steps.with_columns(us.alias("us")))
    assert covariates[axis].low < 4.0 < covariates[axis].high
    assert covariates[axis].high - covariates[axis].low < 2.0
    for other in ("cache", "running"):
        if other != axis:
            assert covariates[other].low < 0 < covariates[other].high


def test_what_hardly_changed_is_not_known():
    rng = np.random.default_rng(1)
    steps = traffic(rng).with_columns(pl.lit(5_000).alias("cache_size"))
    covariates = moved(steps.with_columns(pl.lit(1.0).alias("us")))
    assert covariates["cache"] == "it hardly changed"


def test_two_that_rise_together_are_not_told_apart():
    rng = np.random.default_rng(1)
    steps = traffic(rng).with_columns(free_blocks=20_000 - pl.col("cache_size"))
    us = 3.0 * steps["cache_size"] / 1_000
    covariates = moved(steps.with_columns(us.alias("us")))
    assert (
        covariates["cache"]
        == covariates["context"]
        == "it moved together with the others"
    )
    assert isinstance(covariates["running"], Estimate)


def test_few_steps_say_how_many_are_needed():
    steps = traffic(np.random.default_rng(1), 500)
    covariates = moved(steps.with_columns(pl.lit(1.0).alias("us")))
    assert covariates == dict.fromkeys(COVARIATES, "fewer than 2,000 steps")


def test_an_axis_that_is_missing_from_some_steps_is_not_used():
    rng = np.random.default_rng(1)
    steps = traffic(rng).with_columns(
        cache_size=pl.when(pl.int_range(pl.len()) > 999).then("cache_size"),
        us=2.0 * pl.col("running"),
    )
    covariates = moved(steps)
    assert covariates["cache"] == "not recorded"
    assert covariates["running"].value == pytest.approx(2)


@pytest.mark.parametrize("steps", [2_000, 2_049, 7_777])
def test_slopes_are_least_squares_and_the_interval_the_widest_jackknife(steps):
    rng = np.random.default_rng(steps)
    table = traffic(rng, steps).with_columns(us=pl.Series(noise(rng, steps)))
    number = (pl.int_range(pl.len()) // 50).alias("block")
    used = (pl.col("free_blocks").max() - pl.col("free_blocks")).alias("used_blocks")
    blocks = table.with_columns(used).group_by(number).mean().sort("block")
    columns = [blocks[axis.column] / axis.per for axis in COVARIATES.values()]
    columns.append(blocks["block"])
    design = np.column_stack([np.ones(blocks.height), *columns])
    us = blocks["us"].to_numpy()
    stretch = np.arange(blocks.height) * STRETCHES // blocks.height

    def fit(rows):
        return np.linalg.lstsq(design[rows], us[rows], rcond=None)[0][1:-1]

    def reach(runs: int):
        run = stretch * runs // STRETCHES
        without = np.stack([fit(run != left_out) for left_out in range(runs)])
        return t_quantile(0.975, runs - 1) * np.sqrt((runs - 1) * without.var(axis=0))

    far = np.max([reach(20), reach(10), reach(5)], axis=0)
    covariates = moved(table)
    assert all(isinstance(slope, Estimate) for slope in covariates.values())
    for slope, value, wide in zip(
        covariates.values(), fit(stretch >= 0), far, strict=True
    ):
        assert slope.value == pytest.approx(value, rel=1e-6)
        assert slope.high - slope.low == pytest.approx(2 * wide, rel=1e-6)


BLOCKS = 200
MOMENT = np.arange(BLOCKS) / BLOCKS
CACHES = {
    "fills": MOMENT,
    "full early": np.minimum(1, 4 * MOMENT),
    "reset once": (2 * MOMENT) % 1,
    "reset twice": (3 * MOMENT) % 1,
    "up and down twice": 1 - np.abs((4 * MOMENT) % 2 - 1),
    "reset nine times": (10 * MOMENT) % 1,
}


def slow(rng: np.random.Generator) -> np.ndarray:
    """A speed that is remembered over a tenth of the time."""
    keep = np.exp(-10 / BLOCKS)
    speed = [rng.normal()]
    for shock in rng.normal(0, np.sqrt(1 - keep**2), BLOCKS - 1):
        speed.append(keep * speed[-1] + shock)
    return 100 + 5 * np.array(speed)


def two_speeds(rng: np.random.Generator) -> np.ndarray:
    """A machine that is slower by 30 % in spells of a tenth of the time."""
    spells = rng.exponential(BLOCKS / 10, BLOCKS).astype(int) + 1
    return 100 + 30.0 * np.repeat(np.arange(BLOCKS) % 2, spells)[:BLOCKS]


MACHINES = {
    "steady": lambda rng: np.full(BLOCKS, 100.0),
    "drifting": lambda rng: 100 + 10 * MOMENT,
    "slow": slow,
    "two speeds": two_speeds,
}


def with_cache(cache: np.ndarray, us: np.ndarray) -> pl.DataFrame:
    """Steps whose cost is `us` in each block while |cache| goes this way."""
    return pl.DataFrame(
        {
            "cache_size": np.repeat((15_000 * cache).astype(int), 50),
            "running": 5,
            "free_blocks": 0,
            "prefill_tokens": 0,
            "us": np.repeat(us, 50),
        }
    )


@pytest.mark.parametrize(
    ("cache", "is_known"),
    [("fills", False), ("full early", False), ("reset twice", True)],
)
def test_a_cache_that_went_one_way_says_nothing(cache, is_known):
    slope = moved(with_cache(CACHES[cache], 100 + 10 * CACHES[cache]))["cache"]
    assert isinstance(slope, Estimate) == is_known
    if not is_known:
        assert slope == "it hardly went up and down, so time may be the reason"


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("cache", CACHES)
def test_slopes_of_nothing(cache, machine):
    """A cost that |cache| does not move is called so in 93 % of runs, or unknown."""
    rng = np.random.default_rng(4)
    held = []
    for _ in range(200):
        us = MACHINES[machine](rng) + rng.normal(0, 2, BLOCKS)
        slope = moved(with_cache(CACHES[cache], us))["cache"]
        if isinstance(slope, str):
            assert "time may be the reason" in slope
            assert "reset" not in cache or cache == "reset once"
            return
        held.append(slope.low < 0 < slope.high)
    assert cache not in ("fills", "full early")
    assert np.mean(held) >= 0.93


def overlapping(folder, every: int = 1, steps: int = 3_000):
    """Two steps in flight, one ends every 5 ms; the connector takes 500 us of each."""
    server = Server(folder)
    for _ in range(steps):
        server.step(build_meta_us=500, get_finished_us=0, model_us=9_535)
    for step, worker in zip(server.steps, server.workers, strict=True):
        late_ns = 5_000_000 * step["step_id"] - (step["t_ns"] - FIRST_NS)
        step["t_ns"] += late_ns
        worker["t_ns"] += late_ns
    assert server.steps[0]["step_us"] == pytest.approx(9_700)
    if every > 1:
        rng = np.random.default_rng(7)
        drawn = np.arange(0, steps, every) + rng.integers(0, every, steps // every)
        server.header["every"] = every
        server.steps = [server.steps[i] for i in drawn]
        server.workers = [server.workers[i] for i in drawn]
    return only(server.write())


@pytest.mark.parametrize("every", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_shares_are_of_the_time_that_overlapping_steps_cover(tmp_path, every):
    summary = cost(overlapping(tmp_path / "records", every))
    assert summary.period_us == pytest.approx(5_000, rel=0.01)
    assert summary.connector.share == pytest.approx(0.1, rel=0.01)
    assert summary.connector_ms_per_s == pytest.approx(100, rel=0.01)
    assert sum(part.share for part in summary.parts) >= 1
    assert "one ended every" in summary.overlap


def test_steps_that_do_not_overlap_share_their_own_time(records):
    instance = only(records)
    summary = cost(instance)
    whole = instance.steps["step_us"].sum()
    assert instance.digest.covered_us == pytest.approx(whole, rel=1e-5)
    assert summary.overlap == ""
    assert sum(part.share for part in summary.parts) == pytest.approx(1)


def test_where_no_call_was_timed_the_connector_is_unknown(tmp_path, capsys):
    folder = served(tmp_path / "records", 2_500).without_calls().write()
    assert only(folder).steps["connector_us"].sum() == 0
    page = tmp_path / "page.html"
    assert main([str(folder), "--out", str(page)]) == 0
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if line.startswith("  connector")]
    assert row.split() == ["connector", "unknown"]
    assert "no call of a connector was timed" in printed
    assert "moved by" not in printed
    assert "waited most" in printed
    assert "The cost of the connector in a step of" in page.read_text()


def test_parts_of_requests_are_shares_of_the_sum_of_their_times():
    requests = pl.DataFrame(
        {
            "ttft_us": [10.0, 30.0, None],
            "ttft.queued_us": [1.0, 15.0, None],
            "ttft.model_us": [9.0, 15.0, None],
            "e2e_us": [100.0, 60.0, 40.0],
            "e2e.queued_us": [1.0, 15.0, 24.0],
            "e2e.model_us": [99.0, 45.0, 16.0],
        }
    )
    shares = {"queued": (0.4, 0.2), "model": (0.6, 0.8)}
    assert parts_of_requests(requests) == {
        part: {"ttft": ttft, "e2e": e2e} for part, (ttft, e2e) in shares.items()
    }
    assert parts_of_requests(requests.clear()) == {}


SHORT_CIRCUIT = "kvtax run --fix mooncake_get_finished_short_circuit -- vllm serve"


def server(folder, get_finished_us: float, connectors: list[str]) -> Server:
    made = Server(folder, header={"connectors": connectors} if connectors else {})
    for _ in range(400):
        made.step(get_finished_us=get_finished_us)
    return made


@pytest.mark.parametrize(
    ("us", "connectors", "shows"),
    [
        (219.0, ["MooncakeConnector"], True),
        (219.0, [], True),
        (219.0, ["NixlConnector"], False),
        (3.0, ["MooncakeConnector"], False),
        (32.0, [], False),
    ],
)
def test_a_known_cost_has_its_remedy_in_terminal_and_page(
    us, connectors, shows, tmp_path, capsys
):
    folder = server(tmp_path / "r", us, connectors).write()
    assert main([str(folder)]) == 0
    printed = capsys.readouterr().out
    assert (SHORT_CIRCUIT in printed) is shows
    assert (SHORT_CIRCUIT in (folder / PAGE).read_text()) is shows
    assert "nixl_push_idle_wake" not in printed
    assert ("if it is MooncakeConnector's" in printed) is (shows and not connectors)


def test_the_sentence_has_connector_cost_and_share(tmp_path, capsys):
    folder = server(tmp_path / "r", 219.0, ["MooncakeConnector"]).write()
    assert main([str(folder)]) == 0
    # 5 of build_connector_meta and 219 of get_finished in 2,389 us.
    printed = capsys.readouterr().out
    assert (
        "MooncakeConnector of vLLM 0.18.1 adds 224.0 µs to a step of 2,384" in printed
    )
    assert "Most of it is worker.get_finished, 219.0 µs" in printed


@pytest.mark.parametrize(
    "name",
    [
        "fixed",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("hash_walk", "h100")),
    ],
)
def test_no_sentence_blames_vllm_for_what_a_patch_of_ours_adds(tmp_path, name, capsys):
    unpack(tmp_path)
    folder = tmp_path / name
    patches = only(folder).header.label["patches"]
    assert main([str(folder)]) == 0
    texts = [capsys.readouterr().out, (folder / PAGE).read_text()]
    for text in texts:
        blamed = re.search(r"\w+Connector(?: of vLLM \S+)? adds", text)
        assert bool(blamed) is ("mooncake_hash_sync" not in patches)
        if not blamed:
            assert "mooncake_hash_sync" in text


def test_felt_is_weighted_by_the_time_that_users_wait(tmp_path):
    """An answer of 200 tokens counts more than a hundred of two."""
    requests = pl.DataFrame(
        {
            "is_long": False,
            "ttft_us": [100.0] * 101,
            "ttft.connector_us": [1.0] * 101,
            "e2e_us": [101.0] * 100 + [100_100.0],
            "e2e.connector_us": [1.5] * 100 + [1_001.0],
            "tpot_us": [1.0] * 100 + [500.0],
        }
    )
    shares = felt(requests)
    assert shares["ttft"].share.value == pytest.approx(0.01)
    weighted = (0.5 * 100 + 1_000) / (100 + 100_000)
    assert shares["tpot"].share.value == pytest.approx(weighted)
    assert shares["tpot"].p50 == pytest.approx(0.01)
    assert shares["tpot"].p99 == pytest.approx(0.01)


REMEDY = "kvtax run --fix mooncake_get_finished_short_circuit"
SERVERS = {
    "applied": (
        {"label": {"patches": {"mooncake_get_finished_short_circuit": "x"}}},
        "is applied already",
    ),
    "newer": ({"vllm_version": "0.40.0"}, "yours, 0.40.0, is newer"),
    "older": ({"vllm_version": "0.10.2"}, "yours, 0.10.2, is older"),
}


@pytest.mark.parametrize("kind", SERVERS)
def test_a_remedy_knows_its_server(tmp_path, kind, capsys):
    header, words = SERVERS[kind]
    made = server(tmp_path / "r", 219.0, ["MooncakeConnector"])
    made.header |= header
    main([str(made.write())])
    text = capsys.readouterr().out
    assert words in text
    assert (REMEDY in text) is (kind != "applied")


def test_without_a_worker_the_sentence_says_at_least(tmp_path, capsys):
    folder = served(tmp_path / "r").write()
    (folder / "worker_step.r0.jsonl").unlink()
    main([str(folder)])
    first = capsys.readouterr().out.splitlines()[0]
    assert "adds at least" in first
    assert "only the scheduler's side was recorded" in first


def test_a_thread_that_spins_is_named_with_its_patch(tmp_path, capsys):
    made = server(tmp_path / "r", 3.0, ["NixlConnector"])
    folder = made.write()
    lines: list[dict] = [{"schema": "kvtax.threads/1"}]
    for number in range(10):
        threads = {"MainThread#1": 9e5, "python#77": 9.6e5, "vllm x#78": 9.9e5}
        t_ns = FIRST_NS + number * 10**9
        lines.append({"t_ns": t_ns, "step_id": number, "threads": threads})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "threads.jsonl").write_text(text)
    main([str(folder)])
    out = capsys.readouterr().out
    assert "Thread python keeps a core busy (0.96 of one)" in out
    assert "--fix nixl_progress_delay" in out
    assert "MainThread" not in out and "vllm x" not in out


def test_a_walk_of_the_cache_is_named(tmp_path, capsys):
    made = Server(tmp_path / "r", header={"connectors": ["ForkOfMooncake"]})
    for number in range(4_000):
        blocks = 200 * abs(number % 200 - 100)
        made.step(build_meta_us=5 + blocks * 0.08, cache_size=blocks)
    assert main([str(made.write())]) == 0
    printed = capsys.readouterr().out
    assert "scheduler.build_connector_meta (80 µs per 1,000 cached blocks)" in printed


def test_known_costs_name_patches_releases_and_axes_that_exist():
    patches, releases = load_patches(PATCHES), load_releases(RELEASES_TOML)
    for known_cost in known().cost:
        if known_cost.patch:
            first, *_, last = patches[known_cost.patch].tested(releases)
            assert known_cost.releases == f"{first} to {last}"
        moves_with = known_cost.moves_with
        assert moves_with is None or moves_with in COVARIATES


@pytest.mark.slow
def test_the_demo_shows_a_walk_its_fix_and_an_h100(tmp_path, capsys):
    assert main_of_kvtax(["demo", "--out", str(tmp_path / "demo")]) == 0
    printed = capsys.readouterr().out
    first = printed.splitlines()[0]
    assert first.startswith("h100. MooncakeConnector of vLLM 0.18.1 adds 372.0")
    assert "scheduler.build_connector_meta (" in printed
    assert "docs/" not in printed
    assert SHORT_CIRCUIT in printed
    assert "Warnings" not in printed
    quoted = (REPOSITORY / "README.md").read_text().split("```\n")[1]
    assert " ".join(quoted.split()) in " ".join(printed.split())
    page = (tmp_path / "demo" / PAGE).read_text()
    assert all(name in page for name in ("hash_walk", "fixed", "h100"))


def test_the_demo_is_small():
    assert RECORDS.stat().st_size <= 300_000


DEMO = [sys.executable, "-m", "kvtax", "demo", "--out"]


@pytest.mark.slow
def test_the_demo_on_a_full_disk_says_so_and_leaves_nothing(tmp_path):
    size = (300_000, 300_000)
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, size)
    done = subprocess.run(
        [*DEMO, tmp_path / "out"],
        cwd=REPOSITORY,
        preexec_fn=limit,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"{tmp_path}: File too large; name another folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_stopped_leaves_all_or_nothing(tmp_path, number):
    out = tmp_path / "demo"
    command = [*DEMO, out]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as ran:
        eventually(lambda: list(tmp_path.iterdir()))
        ran.send_signal(number)
        ran.communicate()
    if out.exists():
        assert {path.name for path in out.iterdir()} == {
            *("fixed", "h100", "hash_walk", PAGE)
        }
    elif number != signal.SIGKILL:
        assert ran.returncode == 128 + number
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_demo_removes_what_one_that_was_killed_left_and_no_other_s(tmp_path):
    killed, runs = (tmp_path / f".kvtax-demo-{name}" for name in ("killed", "runs"))
    for folder in (killed, runs):
        (folder / "demo").mkdir(parents=True)
    with demo._held(runs):
        assert main_of_kvtax(["demo", "--out", str(tmp_path / "demo")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"demo", runs.name}


@pytest.mark.slow
def test_a_demo_without_a_folder_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main_of_kvtax(["demo"]) == 0
    assert "kvtax demo --out DIR" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_demo_takes_no_folder_with_files(tmp_path, capsys):
    (tmp_path / "mine").touch()
    assert main_of_kvtax(["demo", "--out", str(tmp_path)]) == 2
    assert "name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
