# SPDX-License-Identifier: Apache-2.0
"""One trial: one fresh server of one config, one driver, one folder of records."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from kvtax.engine import provenance
from kvtax.engine.companion import accompanied
from kvtax.engine.connector import Connector
from kvtax.engine.environment import DIRECT_READ_SECRET, HASH_SEED, YARDSTICK
from kvtax.engine.installation import Installation
from kvtax.engine.null_model import Checkpoint
from kvtax.engine.server import SERVED_MODEL, Engine, Server, ServerError, resolve, tail
from kvtax.proc.ports import Ports, PortsError
from kvtax.proc.supervise import Supervised
from kvtax.records import RecordsError
from kvtax.records.files import read_document, read_lines, write_document
from kvtax.records.run import (
    IdleCost,
    MachineLoad,
    ReadCounts,
    ReadRecord,
    ReadsHeader,
    TrialRecord,
)
from kvtax.records.steps import first_step, only_life
from kvtax.steps.life import whole_steps
from microbench.profile import Profile
from microbench.py_spy import Sampler, SamplingError, processes

SENT_LATE = 3
DRIVER_ERRORS = {
    2: "a request failed",
    4: "the prefix cache could not be reset",
    64: "the driver did not understand its plan",
}
SAMPLED_S = 20.0
PEER_READY_DEADLINE_S = 60.0
# The last answer's work ends, then the server is watched.
SETTLE_S, IDLE_S = 0.5, 2.0


class TrialError(Exception):
    """The trial did not give a valid measurement; the message says why."""


@dataclass(frozen=True)
class PlannedTrial:
    """One server lifetime to come: the `repeat`-th of a config.

    `patches` are the hashes of its patches; `error` says why it cannot be run.
    """

    config: str
    repeat: int
    connector: Connector
    patches: dict[str, str]
    error: str | None = None

    @property
    def folder(self) -> Path:
        """Folder of the trial's records, below the run's."""
        return Path(self.config, f"r{self.repeat}")


@dataclass(frozen=True)
class SweepSettings:
    """Settings shared by all trials of a sweep.

    With `sampled` py-spy looks on, so that nothing can be measured. Servers that
    `start_cold` are not forked.
    """

    profile: Profile
    model: Checkpoint
    installed: Installation
    sampled: bool = False
    start_cold: bool = False


@dataclass
class _TrialFacts:
    """Facts of a trial, as far as it came."""

    ready_s: float | None = None
    pss_mib: float | None = None
    reads: ReadCounts | None = None
    idle: IdleCost | None = None
    machine: MachineLoad | None = None


def run_trial(
    folder: Path, planned: PlannedTrial, overlay: Path, common: SweepSettings
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
    measured, error = _TrialFacts(), planned.error
    if error is None:
        try:
            _measure(folder, planned, overlay, common, measured)
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
        connector_config=provenance.masked(planned.connector.kv_transfer_config),
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
    """Read the record of this trial from an earlier sweep, if it is ok."""
    try:
        done = read_document(folder / "trial.json", TrialRecord)
    except RecordsError:
        return None
    return done if done.status == "ok" and done.patches == planned.patches else None


def _measure(
    folder: Path,
    planned: PlannedTrial,
    overlay: Path,
    common: SweepSettings,
    measured: _TrialFacts,
) -> None:
    """Run server and driver; raise the errors that run_trial catches.

    `measured` then holds what there was.
    """
    profile, connector = common.profile, planned.connector
    plan = profile.plan(SERVED_MODEL, common.model.vocab_size, planned.repeat)
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    label = {
        "config": planned.config,
        "repeat": planned.repeat,
        "patches": planned.patches,
    }
    model, installed = common.model.folder, common.installed
    with contextlib.ExitStack() as stack:
        told = stack.enter_context(accompanied(connector, folder, installed))
        engine = Engine(overlay, profile, told, model, installed)
        spec = resolve(engine, folder, label).told(**YARDSTICK)
        if common.start_cold:
            spec = dataclasses.replace(spec, starts_cold=True)
        server = stack.enter_context(Server(spec))
        measured.ready_s = server.wait_ready()
        before = _Clocks.read(server)
        with _peer(folder, connector, profile.block_size, server.ports):
            _drive(folder, server, common.sampled)
        measured.machine = before.load_until(_Clocks.read(server))
        began_ns, cpu_s = _watch_idle(server)
        measured.pss_mib = server.pss_mib()
    measured.idle = IdleCost(IDLE_S, cpu_s, _steps_of_idle(folder, began_ns))
    _check_fresh(folder, profile)
    if connector.reads_per_s is not None:
        measured.reads = _count_reads(folder)


class _Clocks(NamedTuple):
    """Clocks of the machine and of this run, in s."""

    wall: float
    cores: float
    steal: float
    processes: float
    ours: float

    @classmethod
    def read(cls, server: Server) -> _Clocks:
        """Read them; the driver and the peer count once they have ended."""
        all_cores = psutil.cpu_times()
        return cls(
            wall=time.monotonic(),
            cores=sum(all_cores[:8]),  # without guests, whose time is in `user`
            steal=all_cores.steal,
            processes=all_cores.user + all_cores.nice + all_cores.system,
            ours=sum(os.times()[:4]) + server.cpu_s(),
        )

    def load_until(self, end: _Clocks) -> MachineLoad:
        """Compute the load between two readings."""
        spent = _Clocks(
            *(after - before for before, after in zip(self, end, strict=True))
        )
        others_s = max(spent.processes - spent.ours, 0.0)
        return MachineLoad(
            cores=psutil.cpu_count(),
            seconds=round(spent.wall, 3),
            steal_share=round(spent.steal / spent.cores, 5),
            others_cores=round(others_s / spent.wall, 4),
        )


def _drive(folder: Path, server: Server, sampled: bool) -> None:
    command = [sys.executable, "-m", "microbench.driver", server.url]
    command += [str(folder / "plan.json"), str(folder / "requests.jsonl")]
    command += [str(server.supervised.supervisor_pid)]
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
                sampler = stack.enter_context(
                    Sampler(pids, only_life(folder), SAMPLED_S)
                )
            time.sleep(0.1)
        if sampler is not None:
            sampler.result()
    # Late requests spoil growth and latencies, which then do not count (LoadedTrial),
    # and not what is held.
    if status not in (0, SENT_LATE):
        raise TrialError(
            DRIVER_ERRORS.get(status, f"the driver ended with status {status}")
            + f"\n{tail(folder / 'driver.log')}"
        )


@contextlib.contextmanager
def _peer(
    folder: Path, connector: Connector, block_size: int, ports: Ports
) -> Iterator[None]:
    """Run the peer that reads from the server, if the connector has one."""
    if connector.reads_per_s is None:
        yield
        return
    command = [sys.executable, "-m", "connectors.direct_read.peer", str(folder)]
    command += [str(ports.direct_read), str(block_size), str(connector.reads_per_s)]
    log = folder / "peer.log"
    # Hash seed and secret are the server's.
    shared = {"PYTHONHASHSEED": HASH_SEED, "DIRECT_READ_SECRET": DIRECT_READ_SECRET}
    env = os.environ | shared | connector.env
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


def _watch_idle(server: Server) -> tuple[int, float]:
    """Return since when the server was idle for IDLE_S, and its CPU time in it."""
    time.sleep(SETTLE_S)
    began_ns, before_s = time.monotonic_ns(), server.cpu_s()
    time.sleep(IDLE_S)
    return began_ns, server.cpu_s() - before_s


def _steps_of_idle(folder: Path, began_ns: int) -> int:
    began = whole_steps(only_life(folder)).table["t_ns"]
    end_ns = began_ns + int(IDLE_S * 1e9)
    return int(began.is_between(began_ns, end_ns, closed="left").sum())


def _count_reads(folder: Path) -> ReadCounts:
    """Count reads and blocks. Raises TrialError if no block was valid."""
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
    life = only_life(folder)
    files = (life / "engine_step.jsonl", life / "worker_step.r0.jsonl")
    return processes(life) if all(file.exists() for file in files) else []


def _check_fresh(folder: Path, profile: Profile) -> None:
    """Check that the first engine step found only its own prompt in the cache."""
    first = first_step(only_life(folder) / "engine_step.jsonl")
    found = None if first is None else first.found_blocks(profile.block_size)
    if first is None or found is None:
        raise TrialError(
            "the engine did not record what its first step found cached: does the "
            "config have the patch step_timing_v2?"
        )
    if first.step_id != 0 or found > 0:
        raise TrialError(
            f"the server was not fresh: its first step (id {first.step_id}) found "
            f"{found} cached blocks that it did not bring itself"
        )
