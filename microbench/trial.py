# SPDX-License-Identifier: Apache-2.0
"""One trial: one fresh server of one config, one driver, one folder of records."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonlines
import msgspec

from lab.serving.connector import Connector
from lab.serving.server import HASH_SEED, SERVED_MODEL, Server, ServerError, tail
from lab.serving.supervise import Supervised
from microbench.profile import Profile

DRIVER_ERRORS = {
    2: "a request failed",
    3: "requests were sent late: the run is not valid",
    4: "the prefix cache could not be reset",
    64: "the driver did not understand its plan",
}
PY_SPY_SECONDS = 10
PEER_READY_DEADLINE_S = 60.0


class TrialError(Exception):
    """The trial did not give a valid measurement; the message says why."""


class Trial(msgspec.Struct):
    """What trial.json holds: see docs/records.md."""

    config: str
    repeat: int
    connector_config: dict[str, Any] | None
    patches: dict[str, str]
    num_blocks: int
    block_size: int
    schema: str = "kvtax.trial/1"
    status: str = "ok"
    error: str | None = None
    started_utc: str = ""
    ready_s: float | None = None
    wall_s: float | None = None
    peak_rss_mib: float | None = None
    reads: dict[str, float] | None = None


@dataclass(frozen=True)
class Bench:
    """What all trials of a sweep have in common."""

    profile: Profile
    model: Path
    vocab_size: int
    py_spy: bool


def run_trial(
    folder: Path, trial: Trial, tree: Path, connector: Connector, bench: Bench
) -> Trial:
    """Fill `folder` with one server lifetime's records and its trial.json.

    A trial that goes wrong comes back with status "failed" and its error; its
    records stay where they are.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    trial.started_utc = datetime.datetime.now(datetime.UTC).isoformat(
        timespec="seconds"
    )
    started = time.monotonic()
    profile = bench.profile
    plan = profile.plan(SERVED_MODEL, bench.vocab_size, seed=trial.repeat)
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    label = {
        "config": trial.config,
        "repeat": trial.repeat,
        "patches": trial.patches,
    }
    try:
        log = folder / "server.log"
        with Server(
            tree, profile, connector, bench.model, folder, label, log
        ) as server:
            trial.ready_s = server.wait_ready()
            with _peer(folder, connector, profile):
                _drive(folder, server, bench.py_spy)
            trial.peak_rss_mib = server.peak_rss_mib()
        _check_fresh(folder, profile)
        if connector.reads_per_s is not None:
            trial.reads = _count_reads(folder)
    except (ServerError, TrialError) as error:
        trial.status, trial.error = "failed", str(error)
    trial.wall_s = time.monotonic() - started
    write_trial(folder, trial)
    return trial


def write_trial(folder: Path, trial: Trial) -> None:
    """Write trial.json whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "trial.json.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(trial)))
    partial.replace(folder / "trial.json")


def _drive(folder: Path, server: Server, py_spy: bool) -> None:
    command = [sys.executable, "-m", "microbench.driver", "--url", server.url]
    command += ["--plan", str(folder / "plan.json")]
    command += ["--out", str(folder / "requests.jsonl")]
    with Supervised(command, dict(os.environ), folder / "driver.log") as driver:
        profiler = None
        while (status := driver.poll()) is None:
            if server.supervised.poll() is not None:
                raise TrialError(
                    f"the server died under load\n{tail(folder / 'server.log')}"
                )
            if py_spy and profiler is None:
                profiler = _profile_engine(folder)
            time.sleep(0.1)
        if profiler is not None:
            profiler.wait(PY_SPY_SECONDS + 20)
            profiler.stop()
    if status != 0:
        raise TrialError(
            DRIVER_ERRORS.get(status, f"the driver ended with status {status}")
            + f"\n{tail(folder / 'driver.log')}"
        )


@contextlib.contextmanager
def _peer(folder: Path, connector: Connector, profile: Profile) -> Iterator[None]:
    """A peer that reads from the server, where the connector is to have one."""
    if connector.reads_per_s is None:
        yield
        return
    command = [sys.executable, "-m", "microbench.direct_read_peer", str(folder)]
    command += [str(profile.block_size), str(connector.reads_per_s)]
    log = folder / "peer.log"
    # What hashes and secret depend on is as in the server.
    env = os.environ | {"PYTHONHASHSEED": HASH_SEED} | connector.env
    with Supervised(command, env, log) as peer:
        deadline_s = time.monotonic() + PEER_READY_DEADLINE_S
        while not (folder / "reads.jsonl").exists():
            if peer.poll() is not None or time.monotonic() > deadline_s:
                raise TrialError(f"the peer that reads did not start\n{tail(log)}")
            time.sleep(0.1)
        yield
        if (status := peer.poll()) is not None:
            raise TrialError(
                f"the peer that reads ended with status {status}\n{tail(log)}"
            )


def _count_reads(folder: Path) -> dict[str, float]:
    """How many reads there were, and blocks. Raises TrialError if none was valid."""
    lines = (folder / "reads.jsonl").read_bytes().splitlines(keepends=True)
    # The last line is torn if the peer was stopped while it wrote.
    reads = [msgspec.json.decode(line) for line in lines[1:] if line.endswith(b"\n")]
    began = [read["t_ns"] for read in reads]
    counts = {
        "reads": sum(read["offered"] > 0 for read in reads),
        "blocks_offered": sum(read["offered"] for read in reads),
        "blocks_valid": sum(read["valid"] for read in reads),
        "seconds": (max(began) - min(began)) / 1e9 if began else 0.0,
    }
    if not counts["blocks_valid"]:
        raise TrialError(
            f"the peer read no valid block in {len(reads)} turns"
            f"\n{tail(folder / 'peer.log')}"
        )
    return counts


def _profile_engine(folder: Path) -> Supervised | None:
    """Start py-spy on the engine core once its first record names the process."""
    records = folder / "engine_step.jsonl"
    if not records.exists() or not (header := records.read_text().partition("\n")[0]):
        return None
    command = [str(Path(sys.executable).with_name("py-spy")), "record"]
    command += ["--pid", str(json.loads(header)["pid"])]
    command += ["--duration", str(PY_SPY_SECONDS), "--output", "pyspy.svg"]
    command[-1] = str(folder / "pyspy.svg")
    return Supervised(command, dict(os.environ), folder / "pyspy.log")


def _check_fresh(folder: Path, profile: Profile) -> None:
    """The first engine step must find a cache that holds only its own prompt."""
    with jsonlines.open(folder / "engine_step.jsonl") as lines:
        _header, first = lines.read(), lines.read()
    own_blocks = first["prefill_tokens"] // profile.block_size
    if first["step_id"] != 0 or first["cache_size"] > own_blocks:
        raise TrialError(
            f"the server was not fresh: its first step (id {first['step_id']}) found "
            f"{first['cache_size']} cached blocks and brought {own_blocks} itself"
        )
