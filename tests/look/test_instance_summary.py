# SPDX-License-Identifier: Apache-2.0
"""The summary of an instance: costs, and what they move with."""

from __future__ import annotations

import functools
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from kvtax.cli import demo
from kvtax.cli import main as main_of_kvtax
from kvtax.cli.look import PAGE
from kvtax.engine.releases import RELEASES_TOML
from kvtax.look import instances
from kvtax.look.answer import known_costs
from kvtax.look.demo import RECORDS
from kvtax.look.discover import discover
from kvtax.look.instance_summary import (
    COVARIATES,
    cost,
    moves,
    parts_of_requests,
    quantiles,
    summarise,
    used_blocks,
)
from kvtax.look.instances import one_by_one
from kvtax.patcher import load_patches, load_releases
from kvtax.paths import PATCHES, REPOSITORY
from kvtax.records.warning import RunWarning
from kvtax.stats import Estimate
from kvtax.stats.distribution import t_quantile
from kvtax.stats.least_squares import STRETCHES
from tests.harness.made_up_life import write_servers
from tests.look.by_line import records as by_line
from tests.look.conftest import main, only
from tests.look.made_up_server import FIRST_NS, Server, served
from tests.proc.living import eventually


@pytest.mark.parametrize("count", [1, 2, 3, 50, 99, 100, 101, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_quantiles_are_those_of_the_series(count, seed):
    rng = np.random.default_rng(seed)
    us = pl.Series(rng.exponential(50, count).round(1), dtype=pl.Float32)
    shares = (0.0, 0.5, 0.9, 0.99, 1.0)
    assert quantiles(us, shares) == [us.quantile(share) for share in shares]


def test_a_part_is_told_as_its_steps_were(records):
    instance = only(records)
    told = cost(instance)
    for part in (told.step, *told.parts, *told.methods):
        us = instance.steps[part.column]
        assert part.mean_us == us.mean()
        assert part.most_us == us.max()
        assert (part.p50_us, part.p99_us) == (us.quantile(0.5), us.quantile(0.99))


def test_each_method_and_their_sum_have_slopes(tmp_path):
    instance = only(served(tmp_path / "records", 2_500).write())
    told = summarise(instance)
    assert list(told.slopes) == ["connector_us", *instance.methods]
    whole = told.slopes["connector_us"]["cache"].value
    parts = [told.slopes[name]["cache"].value for name in instance.methods]
    assert sum(parts) == pytest.approx(whole, abs=1e-4)


@pytest.fixture
def three(tmp_path):
    for name in "abc":
        served(tmp_path / name, steps=50).write()
    return tmp_path


def test_one_bad_instance_is_a_warning_in_its_place(three):
    with (three / "b" / "engine_step.jsonl").open("a") as file:
        for step_id in range(11):
            file.write(f'{{"step_id": {step_id}, "t_ns": 1}}\n')
    found, _ = discover(three)
    first, bad, last = one_by_one(found)
    assert (first.name, last.name) == ("a", "c")
    assert isinstance(bad, RunWarning)
    assert "two processes wrote this file" in bad.message


def test_the_next_instance_is_read_while_one_is_looked_at_and_no_more(
    three, monkeypatch
):
    read = {name: threading.Event() for name in "abc"}
    read_instance = instances.read_instance

    def noted(found):
        read[found.name].set()
        return read_instance(found)

    monkeypatch.setattr(instances, "read_instance", noted)
    found, _ = discover(three)
    reading = one_by_one(found)
    assert next(reading).name == "a"
    assert read["b"].wait(120)
    assert not read["c"].wait(0.2)
    assert [one.name for one in reading] == ["b", "c"]


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
    return moves(steps, ["us"])["us"]


@pytest.mark.parametrize(
    ("axis", "column", "per"),
    [("cache", "cache_size", 1_000), ("running", "running", 1)],
)
def test_a_slope_is_found_on_its_axis_and_not_on_the_others(axis, column, per):
    rng = np.random.default_rng(3)
    steps = traffic(rng)
    us = 10 + 4.0 * steps[column] / per + noise(rng, steps.height)
    found = moved(steps.with_columns(us.alias("us")))
    assert found[axis].low < 4.0 < found[axis].high
    assert found[axis].high - found[axis].low < 2.0
    for other in ("cache", "running"):
        if other != axis:
            assert found[other].low < 0 < found[other].high


def test_what_hardly_changed_is_not_known():
    rng = np.random.default_rng(1)
    steps = traffic(rng).with_columns(pl.lit(5_000).alias("cache_size"))
    found = moved(steps.with_columns(pl.lit(1.0).alias("us")))
    assert found["cache"] == "it hardly changed"


def test_two_that_rise_together_are_not_told_apart():
    rng = np.random.default_rng(1)
    steps = traffic(rng).with_columns(free_blocks=20_000 - pl.col("cache_size"))
    us = 3.0 * steps["cache_size"] / 1_000
    found = moved(steps.with_columns(us.alias("us")))
    assert found["cache"] == found["context"] == "it moved together with the others"
    assert isinstance(found["running"], Estimate)


def test_few_steps_say_how_many_are_needed():
    steps = traffic(np.random.default_rng(1), 500)
    found = moved(steps.with_columns(pl.lit(1.0).alias("us")))
    assert found == dict.fromkeys(COVARIATES, "fewer than 2,000 steps")


def test_many_times_at_once_are_found_as_each_by_itself():
    rng = np.random.default_rng(5)
    steps = traffic(rng).with_columns(
        a=pl.Series(noise(rng, 20_000)).cast(pl.Float32),
        b=3.0 * pl.col("running"),
        c=pl.lit(0.0),
    )
    together = moves(steps, ["a", "b", "c"])
    assert list(together) == ["a", "b", "c"]
    for time, by_axis in together.items():
        alone = moves(steps, [time])[time]
        assert list(by_axis) == list(alone) == list(COVARIATES)
        for name, slope in by_axis.items():
            other = alone[name]
            assert slope.value == pytest.approx(other.value, abs=1e-9)
            assert slope.ci95 == pytest.approx(other.ci95, abs=1e-9)
    assert together["b"]["running"].value == pytest.approx(3)
    assert together["c"]["cache"] == Estimate(0, (0, 0))


def test_an_axis_that_is_missing_from_some_steps_is_not_used():
    rng = np.random.default_rng(1)
    steps = traffic(rng).with_columns(
        cache_size=pl.when(pl.int_range(pl.len()) > 999).then("cache_size"),
        us=2.0 * pl.col("running"),
    )
    found = moved(steps)
    assert found["cache"] == "not recorded"
    assert found["running"].value == pytest.approx(2)


@pytest.mark.parametrize("steps", [2_000, 2_049, 7_777])
def test_slopes_are_least_squares_and_the_interval_the_widest_jackknife(steps):
    rng = np.random.default_rng(steps)
    table = traffic(rng, steps).with_columns(us=pl.Series(noise(rng, steps)))
    number = (pl.int_range(pl.len()) // 50).alias("block")
    blocks = used_blocks(table).group_by(number).mean().sort("block")
    columns = [blocks[axis.column] / axis.per for axis in COVARIATES.values()]
    columns.append(blocks["block"])
    design = np.column_stack([np.ones(blocks.height), *columns])
    us = blocks["us"].to_numpy()
    stretch = np.arange(blocks.height) * STRETCHES // blocks.height

    def fit(rows):
        return np.linalg.lstsq(design[rows], us[rows], rcond=None)[0][1:-1]

    def reach(runs: int):
        run = stretch * runs // STRETCHES
        without = np.stack([fit(run != one) for one in range(runs)])
        return t_quantile(0.975, runs - 1) * np.sqrt((runs - 1) * without.var(axis=0))

    far = np.max([reach(20), reach(10), reach(5)], axis=0)
    found = moved(table)
    assert all(isinstance(slope, Estimate) for slope in found.values())
    for slope, value, wide in zip(found.values(), fit(stretch >= 0), far, strict=True):
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


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("cache", CACHES)
def test_slopes_of_nothing(cache, machine):
    """A cost that |cache| does not move is called so in 93 % of runs, or unknown."""
    rng = np.random.default_rng(4)
    held = []
    for _ in range(200):
        us = MACHINES[machine](rng) + rng.normal(0, 2, BLOCKS)
        steps = pl.DataFrame(
            {
                "cache_size": np.repeat((15_000 * CACHES[cache]).astype(int), 50),
                "running": 5,
                "free_blocks": 0,
                "prefill_tokens": 0,
                "us": np.repeat(us, 50),
            }
        )
        slope = moved(steps)["cache"]
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


@pytest.mark.parametrize("every", [1, 4])
def test_shares_are_of_the_time_that_overlapping_steps_cover(tmp_path, every):
    told = cost(overlapping(tmp_path / "records", every))
    assert told.period_us == pytest.approx(5_000, rel=0.01)
    assert told.connector.share == pytest.approx(0.1, rel=0.01)
    assert told.connector_ms_per_s == pytest.approx(100, rel=0.01)
    assert sum(part.share for part in told.parts) >= 1
    assert "one ended every" in told.overlap


def test_steps_that_do_not_overlap_share_their_own_time(records):
    instance = only(records)
    told = cost(instance)
    whole = instance.steps["step_us"].sum()
    assert instance.covered_us == pytest.approx(whole, rel=1e-6)
    assert told.overlap == ""
    assert sum(part.share for part in told.parts) == pytest.approx(1)


def test_where_no_call_was_timed_the_connector_is_unknown(tmp_path, capsys):
    folder = served(tmp_path / "records", 2_500).without_calls().write()
    assert only(folder).steps["connector_us"].sum() == 0
    page = tmp_path / "page.html"
    assert main([str(folder), "--out", str(page)]) == 0
    told = capsys.readouterr().out
    (row,) = [line for line in told.splitlines() if line.startswith("  connector")]
    assert row.split() == ["connector", "unknown"]
    assert "no call of a connector was timed" in told
    assert "moved by" not in told
    assert "waited most" in told
    assert "What the connector adds to a step of" in page.read_text()


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


def test_the_parts_of_requests_are_all_their_time(tmp_path, capsys):
    folder = served(tmp_path / "records", 2_500).write()
    assert main([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("where requests'"))
    parts = [line.split()[-2:] for line in lines[at + 1 : at + 7]]
    for shares in zip(*parts, strict=True):
        total = sum(float(share.removesuffix("%")) for share in shares)
        assert total == pytest.approx(100, abs=0.05)


STEPS = 2_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compact")
    write_servers(folder, STEPS, 1)
    return folder / "server00"


def test_parts_are_those_of_a_sum_over_the_lines(folder: Path) -> None:
    workers = {one["step_id"]: one for one in by_line(folder / "worker_step.r0.jsonl")}
    rows = []
    for step in by_line(folder / "engine_step.jsonl"):
        worker = workers[step["step_id"]]
        inside, beside = (sum(one["calls_us"].values()) for one in (step, worker))
        scheduler = max(step["schedule_us"] + step["update_us"] - inside, 0)
        model = max(worker["execute_model_us"] - beside, 0)
        parts = model, scheduler, inside + beside
        # A worker's record may be longer than its step.
        rows.append((*parts, max(step["step_us"] - sum(parts), 0)))
    instance = only(folder)
    assert instance.warnings == []
    told = cost(instance)
    names = ["model", "scheduler", "connector", "other"]
    assert [part.name for part in told.parts] == names
    for part, us in zip(told.parts, np.array(rows).T, strict=True):
        assert part.mean_us == pytest.approx(us.mean(), rel=1e-5)
        assert part.most_us == pytest.approx(us.max(), rel=1e-5)
    rare = next(part for part in told.methods if "request_finished" in part.name)
    assert rare.calls_per_step == pytest.approx(1 / 50)


def test_nothing_is_written_that_was_not_measured(folder: Path, capsys) -> None:
    text = (folder / "engine_step.jsonl").read_text().partition("\n")[2]
    assert "null" not in text
    assert len(text) / STEPS < 260
    assert main([str(folder)]) == 0
    assert f"{STEPS:,} steps in" in capsys.readouterr().out


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
    told = capsys.readouterr().out
    assert (SHORT_CIRCUIT in told) is shows
    assert (SHORT_CIRCUIT in (folder / PAGE).read_text()) is shows
    assert "nixl_push_idle_wake" not in told
    assert ("if it is MooncakeConnector's" in told) is (shows and not connectors)


def test_the_sentence_has_connector_cost_and_share(tmp_path, capsys):
    folder = server(tmp_path / "r", 219.0, ["MooncakeConnector"]).write()
    assert main([str(folder)]) == 0
    # 5 of build_connector_meta and 219 of get_finished in 2,389 us.
    told = capsys.readouterr().out
    assert "MooncakeConnector adds 224.0 µs to a step of 2,384 µs" in told
    assert "most of it worker.get_finished (219.0 µs)" in told


def test_a_walk_of_the_cache_is_named(tmp_path, capsys):
    made = Server(tmp_path / "r", header={"connectors": ["ForkOfMooncake"]})
    for number in range(4_000):
        blocks = 200 * abs(number % 200 - 100)
        made.step(build_meta_us=5 + blocks * 0.08, cache_size=blocks)
    assert main([str(made.write())]) == 0
    told = capsys.readouterr().out
    assert "scheduler.build_connector_meta (80 µs per 1,000 cached blocks)" in told


def test_known_costs_name_patches_releases_and_axes_that_exist():
    patches, releases = load_patches(PATCHES), load_releases(RELEASES_TOML)
    for known in known_costs():
        if known.patch:
            first, *_, last = patches[known.patch].tested(releases)
            assert known.releases == f"{first} to {last}"
        assert known.moves_with is None or known.moves_with in COVARIATES


@pytest.mark.slow
def test_the_demo_shows_a_walk_its_fix_and_an_h100(tmp_path, capsys):
    assert main_of_kvtax(["demo", "--out", str(tmp_path / "demo")]) == 0
    told = capsys.readouterr().out
    assert "scheduler.build_connector_meta (" in told and "docs/fixes.md" in told
    assert SHORT_CIRCUIT in told
    assert "Warnings" not in told
    quoted = (REPOSITORY / "README.md").read_text().split("```\n")[1]
    assert " ".join(quoted.split()) in " ".join(told.split())
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


def test_the_demo_takes_no_folder_with_files(tmp_path, capsys):
    (tmp_path / "mine").touch()
    assert main_of_kvtax(["demo", "--out", str(tmp_path)]) == 2
    assert "name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
