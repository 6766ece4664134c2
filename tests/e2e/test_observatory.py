# SPDX-License-Identifier: Apache-2.0
"""A real engine, held at the levels of an axis, shows a cost where it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from kvtax.axes import cell
from kvtax.axes.cell import Measured
from kvtax.engine import ServerError
from kvtax.engine.connector import own_connector
from kvtax.engine.installation import installation
from kvtax.paths import REPOSITORY
from kvtax.records.files import read_document
from kvtax.records.observatory_cell import CellRecord
from kvtax.verdict.axes import AXES, growth
from tests.harness.made_up import made

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3_600)]

HONEST = "from connectors.noop import NoopConnector as Mine\n"
# 5 us per running request, and per run of neighbours among a new request's blocks;
# 0.8 us per block of a prompt that is looked up, and 0.3 us per cached token of it.
BROKEN = """
import time
from itertools import pairwise
from connectors.noop import NoopConnector

def take(us):
    until = time.perf_counter() + 1e-6 * us
    while time.perf_counter() < until:
        pass

class Mine(NoopConnector):
    def build_connector_meta(self, scheduler_output):
        take(5 * len(scheduler_output.num_scheduled_tokens))
        return super().build_connector_meta(scheduler_output)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        take(0.8 * (request.num_prompt_tokens // 16) + 0.3 * num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        ids = blocks.get_block_ids()[0]
        take(5 * (1 + sum(after != before + 1 for before, after in pairwise(ids))))
"""
LIMITS = '[axes.running]\nshape = { connector = "flat" }\n'
META = "scheduler.build_connector_meta_us"
LOOKED_UP = "scheduler.get_num_new_matched_tokens_us"
ALLOCATED = "scheduler.update_state_after_alloc_us"


def gate(folder: Path, code: str, *options: object) -> subprocess.CompletedProcess:
    (folder / "mine.py").write_text(code)
    command = [sys.executable, "-m", "kvtax", "gate", "mine:Mine"]
    return subprocess.run(
        [*command, *map(str, options)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """(what the gate did, the cell) of a connector that grows with running requests."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "limits.toml").write_text(LIMITS)
    cell = folder / "cell.json"
    summary = folder / "summary.md"
    options = ["--limits", folder / "limits.toml", "--out", cell, "--summary", summary]
    run = gate(folder, BROKEN, *options, "--junit", folder / "junit.xml")
    assert cell.exists(), run.stderr
    assert "<failure" in (folder / "junit.xml").read_text()
    run.summary = summary.read_text()
    return run, read_document(cell, CellRecord)


@pytest.mark.serial
def test_the_growth_is_found_along_its_axis_with_its_slope_and_no_other(broken):
    _, cell = broken
    running = growth(cell, "running", META)
    assert running.shape == "linear"
    assert running.slope.ci95[0] <= 5.3
    assert running.slope.ci95[1] >= 5.0
    shapes = {axis: growth(cell, axis, META).shape for axis in ("cache", "context")}
    assert "linear" not in shapes.values()


@pytest.mark.serial
def test_an_arriving_request_lies_in_as_many_fragments_as_the_level_says(broken):
    _, cell = broken
    rise = growth(cell, "fragments", ALLOCATED)
    assert rise.shape == "linear"
    assert rise.slope.ci95[0] <= 5.2
    assert rise.slope.ci95[1] >= 4.9
    # Whoever looks at each step of the request, not at its blocks, does not grow.
    assert growth(cell, "fragments", META).verdict == "flat"


@pytest.mark.serial
def test_a_look_up_of_the_prompts_blocks_grows_with_the_prompt_alone(broken):
    _, cell = broken
    rise = growth(cell, "prompt", LOOKED_UP)
    assert rise.shape == "linear"
    # 62.5 blocks in 1,000 tokens.
    assert rise.slope.ci95[0] <= 0.8 * 62.5 * 1.05
    assert rise.slope.ci95[1] >= 0.8 * 62.5
    others = [axis for axis in cell.means_us if axis not in ("prompt", "hits")]
    assert {growth(cell, axis, LOOKED_UP).verdict for axis in others} == {"flat"}
    assert growth(cell, "prompt", META).verdict == "flat"
    # A walk of the block ids; if no two were neighbours, it would take 300 more.
    assert growth(cell, "prompt", ALLOCATED).slope.ci95[1] < 30


@pytest.mark.serial
def test_a_cost_per_cached_token_of_a_prompt_grows_with_the_hits(broken):
    _, cell = broken
    grown = growth(cell, "hits", LOOKED_UP)
    assert grown.shape == "linear"
    per_1k_us = 0.3 * 1_000 + 0.8 * 62.5
    assert grown.slope.ci95[0] <= per_1k_us * 1.05
    assert grown.slope.ci95[1] >= per_1k_us


@pytest.mark.serial
def test_an_engine_without_requests_takes_no_step_of_its_own(broken):
    _, cell = broken
    assert cell.idle.steps_per_s == 0
    assert cell.idle.cpu_ms_per_s < 20


@pytest.mark.serial
def test_the_summary_is_what_is_printed(broken):
    run, _ = broken
    assert run.summary.strip()
    assert run.summary.strip() in run.stdout


@pytest.mark.serial
def test_the_gate_ends_with_1_and_names_what_grew_along_what(broken):
    run, _ = broken
    assert run.returncode == 1, run.stderr
    assert "growth of connector along running" in run.stdout


def test_a_connector_that_does_not_start_is_told_with_its_reason(tmp_path):
    run = gate(tmp_path, "")
    assert run.returncode == 3
    assert "Mine not found in mine" in run.stderr


def run_mine(folder: Path, code: str, changed: pytest.MonkeyPatch) -> Measured:
    """Hold the connector of `code` at each level of each axis."""
    (folder / "mine.py").write_text(code)
    changed.setenv("PYTHONPATH", os.pathsep.join(map(str, [folder, REPOSITORY])))
    _, connector = own_connector("mine:Mine", None)
    (result,) = cell.run([(connector, installation())], folder)
    return result


# Costs that no axis shows that is moved alone, or by means of steps alone.
HIDDEN = """
from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
import threading
import time

from vllm.v1.core.block_pool import BlockPool

from connectors.noop import NoopConnector

# Busy for 0.1 us per cached block, which the parent writes into a file; then asleep.
HELPER = '''
import mmap, os, struct, sys, time
file, parent = open(sys.argv[1], "r+b"), os.getppid()
pool = mmap.mmap(file.fileno(), 8)
while os.getppid() == parent:
    until = time.perf_counter() + 1e-7 * struct.unpack("q", pool[:8])[0]
    while time.perf_counter() < until:
        pass
    time.sleep(0.002)
'''
pools: list[BlockPool] = []
_init = BlockPool.__init__


def _noted(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    pools.append(self)


BlockPool.__init__ = _noted


def cached() -> int:
    return len(pools[-1].cached_block_hash_to_block) if pools else 0


def take(us: float) -> None:
    until_ns = time.thread_time_ns() + us * 1e3
    while time.thread_time_ns() < until_ns:
        pass


class Mine(NoopConnector):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._calls = 0
        if "SCHEDULER" in str(args[1] if len(args) > 1 else kwargs["role"]):
            # As the recorder calls its own.
            name = "records-engine_step"
            threading.Thread(target=self._write, name=name, daemon=True).start()
            self._start_helper()

    def _start_helper(self) -> None:
        self._file = tempfile.NamedTemporaryFile()
        self._file.write(bytes(8))
        self._file.flush()
        self._blocks = mmap.mmap(self._file.fileno(), 8)
        subprocess.Popen([sys.executable, "-S", "-c", HELPER, self._file.name])

    def _write(self) -> None:
        while True:
            time.sleep(0.003)
            take(300 + 0.03 * cached())

    def build_connector_meta(self, scheduler_output):
        # 40 us per 1,000 cached blocks if 12 requests or more are scheduled.
        self._blocks[:8] = cached().to_bytes(8, "little")
        if len(scheduler_output.num_scheduled_tokens) >= 12:
            take(0.04 * cached())
        return super().build_connector_meta(scheduler_output)

    def get_finished(self, finished_req_ids):
        # 6 ms in one step of 200 with more than half of the blocks cached.
        self._calls += 1
        if self._calls % 200 == 0 and cached() > 9_000:
            take(6_000)
        return None, None
"""


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """Return the passes of HIDDEN over both axes of the cache."""
    folder = tmp_path_factory.mktemp("hidden")
    with pytest.MonkeyPatch.context() as changed:
        axes = {name: AXES[name] for name in ("cache", "cache_at_32")}
        changed.setattr(cell, "AXES", axes)
        result = run_mine(folder, HIDDEN, changed)
    return msgspec.structs.replace(
        made(), means_us=result.means_us, holds=result.holds, idle=result.idle
    )


def rise_us(cell: CellRecord, axis: str, time: str) -> float:
    """Return by how much the last level of `axis` lies above the first."""
    rise = growth(cell, axis, time)
    assert rise is not None
    return rise.level_us[-1] - rise.level_us[0]


@pytest.mark.long
@pytest.mark.serial
def test_a_cost_that_needs_a_cache_and_a_large_batch_is_seen_with_both(hidden):
    assert rise_us(hidden, "cache", META) < 50
    # 40 us per 1,000 blocks.
    assert rise_us(hidden, "cache_at_32", META) > 600


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.parametrize("time", ["threads_us", "processes_us"])
def test_a_thread_of_any_name_and_a_process_of_the_connector_are_seen(hidden, time):
    assert rise_us(hidden, "cache", time) > 50


@pytest.mark.long
@pytest.mark.serial
def test_a_thread_that_is_busy_without_a_request_is_seen(hidden):
    # 300 us every 3 ms, and a helper that wakes every 2 ms.
    assert 20 < hidden.idle.cpu_ms_per_s < 200


@pytest.mark.long
@pytest.mark.serial
def test_a_cost_of_one_step_in_200_is_counted_where_it_is(hidden):
    by_level = [sum(counts) for counts in zip(*hidden.holds["cache"].slow, strict=True)]
    assert sum(by_level[3:]) >= 8


KEEPS = """
from connectors.noop import NoopConnector

class Mine(NoopConnector):
    def request_finished(self, request, block_ids):
        return True, None

    def request_finished_all_groups(self, request, block_ids):
        return True, None
"""
# Repeats what ExampleConnector does: all that is computed goes to a file.
STORES = """
import tempfile
from connectors.noop import NoopConnector

class Mine(NoopConnector):
    def build_connector_meta(self, scheduler_output):
        with tempfile.TemporaryFile() as file:
            file.write(bytes(10_000 * scheduler_output.total_num_scheduled_tokens))
        return super().build_connector_meta(scheduler_output)
"""


@pytest.mark.parametrize("optimised", ["1", pytest.param("", marks=pytest.mark.long)])
def test_a_connector_that_never_frees_its_blocks_is_refused_with_that(
    tmp_path, optimised, monkeypatch
):
    monkeypatch.setenv("PYTHONOPTIMIZE", optimised)
    with pytest.raises(ServerError) as failure:
        run_mine(tmp_path, KEEPS, monkeypatch)
    why = cell.reason(str(failure.value))
    assert why.startswith("ConnectorError: the connector holds the blocks of ")
    assert "get_finished() did not report them" in why


def test_a_connector_that_would_fill_the_disk_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(cell, "MOST_WRITTEN_BYTES", 2**28)
    with pytest.raises(ServerError, match=r"ConnectorError: the connector wrote 0\.\d"):
        run_mine(tmp_path, STORES, monkeypatch)


@pytest.mark.long
@pytest.mark.serial
def test_the_action_passes_what_is_honest_and_names_what_got_worse(tmp_path):
    action = yaml.safe_load((REPOSITORY / "action.yml").read_text())
    (script,) = [
        step["run"] for step in action["runs"]["steps"] if step.get("id") == "gate"
    ]
    place, old = tmp_path / "kvtax", tmp_path / "old.json"
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "kvtax").symlink_to(Path(sys.executable).with_name("kvtax"))
    (tmp_path / "limits.toml").write_text(LIMITS)
    described = {
        "PLACE": str(place),
        "CONNECTOR": "mine:Mine",
        "CONFIG": "",
        "LIMITS": "limits.toml",
        "SINCE": str(old),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }

    def step() -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=os.environ | described,
            capture_output=True,
            text=True,
        )

    (tmp_path / "mine.py").write_text(HONEST)
    honest = step()
    assert honest.returncode == 0, honest.stderr
    (place / "cell.json").rename(old)
    (tmp_path / "mine.py").write_text(BROKEN)
    worse = step()
    assert worse.returncode == 1
    summary = (tmp_path / "summary.md").read_text()
    assert "slope of scheduler.build_connector_meta along running, since" in summary
