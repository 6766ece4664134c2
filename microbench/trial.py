# SPDX-License-Identifier: Apache-2.0
"""One trial: one fresh server of one config, one driver, one folder of records."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lab.records import RecordsError
from lab.records.documents import read_document, write_document
from lab.records.lines import read_lines
from lab.records.reads import ReadRecord, ReadsHeader
from lab.records.steps import first_step
from lab.records.trial import ReadCounts, TrialRecord
from lab.serving.companion import accompanied
from lab.serving.connector import Connector
from lab.serving.environment import HASH_SEED
from lab.serving.installation import Installation
from lab.serving.null_model import Checkpoint
from lab.serving.ports import Ports, PortsError
from lab.serving.py_spy import Sampler, SamplingError, processes
from lab.serving.server import Server, ServerError, tail
from lab.serving.server_spec import SERVED_MODEL, Engine, resolve
from lab.serving.supervise import Supervised
from microbench.profile import Profile

SENT_LATE = 3
DRIVER_ERRORS = {
    2: "a request failed",
    SENT_LATE: "requests were sent late: the run is not valid",
    4: "the prefix cache could not be reset",
    64: "the driver did not understand its plan",
}
SAMPLED_S = 20.0
PEER_READY_DEADLINE_S = 60.0


class TrialError(Exception):
    """The trial did not give a valid measurement; the message says why."""


@dataclass(frozen=True)
class PlannedTrial:
    """One server lifetime to come: the `repeat`-th of a config.

    `patches` are the hashes of its private tree; `error` says why it cannot be run.
    """

    config: str
    repeat: int
    connector: Connector
    patches: dict[str, str]
    error: str | None = None

    @property
    def folder(self) -> Path:
        """Of its records, below that of the run."""
        return Path(self.config, f"r{self.repeat}")


@dataclass(frozen=True)
class SweepSettings:
    """What all trials of a sweep have in common.

    With `sampled` py-spy looks on, so that nothing can be measured.
    """

    profile: Profile
    model: Checkpoint
    installed: Installation
    sampled: bool = False


@dataclass
class _Measured:
    """What a trial found out, as far as it came."""

    ready_s: float | None = None
    peak_rss_mib: float | None = None
    reads: ReadCounts | None = None


def run_trial(
    folder: Path, planned: PlannedTrial, tree: Path, common: SweepSettings
) -> TrialRecord:
    """Fill `folder` with one server lifetime's records and its trial.json.

    A trial that goes wrong comes back with status "failed" and its error; its
    records stay where they are.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    started = time.monotonic()
    measured, error = _Measured(), planned.error
    if error is None:
        try:
            _measure(folder, planned, tree, common, measured)
        except (
            ServerError,
            PortsError,
            TrialError,
            RecordsError,
            SamplingError,
        ) as failure:
            error = str(failure)
    record = TrialRecord(
        config=planned.config,
        repeat=planned.repeat,
        connector_config=planned.connector.kv_transfer_config,
        patches=planned.patches,
        num_blocks=common.profile.num_blocks,
        block_size=common.profile.block_size,
        status="ok" if error is None else "failed",
        error=error,
        started_utc=now if planned.error is None else None,
        wall_s=time.monotonic() - started if planned.error is None else None,
        **vars(measured),
    )
    write_document(folder / "trial.json", record)
    return record


def read_finished(folder: Path, planned: PlannedTrial) -> TrialRecord | None:
    """The record that an earlier sweep left in `folder` of this trial, if it is ok."""
    try:
        done = read_document(folder / "trial.json", TrialRecord)
    except RecordsError:
        return None
    return done if done.status == "ok" and done.patches == planned.patches else None


def _measure(
    folder: Path,
    planned: PlannedTrial,
    tree: Path,
    common: SweepSettings,
    measured: _Measured,
) -> None:
    """Raises ServerError, PortsError, TrialError, RecordsError and SamplingError.

    `measured` then holds what there was.
    """
    profile, connector = common.profile, planned.connector
    plan = profile.plan(SERVED_MODEL, common.model.vocab_size, seed=planned.repeat)
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    label = {
        "config": planned.config,
        "repeat": planned.repeat,
        "patches": planned.patches,
    }
    model, installed = common.model.folder, common.installed
    with contextlib.ExitStack() as stack:
        told = stack.enter_context(accompanied(connector, folder, installed))
        engine = Engine(tree, profile, told, model, installed)
        server = stack.enter_context(Server(resolve(engine, folder, label)))
        measured.ready_s = server.wait_ready()
        with _peer(folder, connector, profile.block_size, server.ports):
            _drive(folder, server, common.sampled)
        measured.peak_rss_mib = server.peak_rss_mib()
    _check_fresh(folder, profile)
    if connector.reads_per_s is not None:
        measured.reads = _count_reads(folder)


def _drive(folder: Path, server: Server, sampled: bool) -> None:
    command = [sys.executable, "-m", "microbench.driver", "--url", server.url]
    command += ["--plan", str(folder / "plan.json")]
    command += ["--out", str(folder / "requests.jsonl")]
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(
            Supervised(command, dict(os.environ), folder / "driver.log")
        )
        sampler = None
        while (status := driver.poll()) is None:
            if server.supervised.poll() is not None:
                raise TrialError(
                    f"the server died under load\n{tail(folder / 'server.log')}"
                )
            if sampled and sampler is None and (pids := _recorded(folder)):
                sampler = stack.enter_context(Sampler(pids, folder, SAMPLED_S))
            time.sleep(0.1)
        if sampler is not None:
            sampler.result()
    # Sampling holds the driver up, too.
    if status != 0 and not (sampled and status == SENT_LATE):
        raise TrialError(
            DRIVER_ERRORS.get(status, f"the driver ended with status {status}")
            + f"\n{tail(folder / 'driver.log')}"
        )


@contextlib.contextmanager
def _peer(
    folder: Path, connector: Connector, block_size: int, ports: Ports
) -> Iterator[None]:
    """A peer that reads from the server, where the connector is to have one."""
    if connector.reads_per_s is None:
        yield
        return
    command = [sys.executable, "-m", "microbench.direct_read_peer", str(folder)]
    command += [str(ports.direct_read), str(block_size), str(connector.reads_per_s)]
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


def _count_reads(folder: Path) -> ReadCounts:
    """How many reads there were, and blocks. Raises TrialError if none was valid."""
    reads = read_lines(folder / "reads.jsonl", ReadsHeader, ReadRecord).records
    began = [read.t_ns for read in reads]
    counts = ReadCounts(
        reads=sum(read.offered > 0 for read in reads),
        blocks_offered=sum(read.offered for read in reads),
        blocks_valid=sum(read.valid for read in reads),
        seconds=(max(began) - min(began)) / 1e9 if began else 0.0,
    )
    if not counts.blocks_valid:
        raise TrialError(
            f"the peer read no valid block in {len(reads)} turns"
            f"\n{tail(folder / 'peer.log')}"
        )
    return counts


def _recorded(folder: Path) -> list[int]:
    """Engine and workers, once the first records name them."""
    files = (folder / "engine_step.jsonl", folder / "worker_step.r0.jsonl")
    if not all(file.exists() and file.stat().st_size for file in files):
        return []
    return processes(folder)


def _check_fresh(folder: Path, profile: Profile) -> None:
    """The first engine step must find a cache that holds only its own prompt."""
    first = first_step(folder / "engine_step.jsonl")
    found = first and first.found_blocks(profile.block_size)
    if found is None:
        raise TrialError(
            "the engine did not record what its first step found cached: does the "
            "config have the patches step_timing_v1 and step_timing_v2?"
        )
    if first.step_id != 0 or found > 0:
        raise TrialError(
            f"the server was not fresh: its first step (id {first.step_id}) found "
            f"{found} cached blocks that it did not bring itself"
        )
