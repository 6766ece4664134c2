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
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtax.engine import ServerError
from kvtax.engine.companion import accompanied
from kvtax.engine.connector import Connector
from kvtax.engine.installation import Installation
from kvtax.engine.null_model import Checkpoint
from kvtax.engine.published import published
from kvtax.engine.server import (
    SERVED_MODEL,
    Server,
    ServerSpec,
    resolve,
    tail,
)
from kvtax.proc.ports import PortsError
from kvtax.proc.supervise import Supervised
from kvtax.records import RecordsError
from kvtax.records.files import read_document, write_document
from kvtax.records.run import IdleCost, MachineLoad, ReadCounts, TrialRecord
from kvtax.records.steps import first_step, only_life
from kvtax.steps.forwards import FORWARDS
from kvtax.steps.life import whole_steps
from microbench.cpu_profile import Sampler, SamplingError
from microbench.machine_load import Clocks
from microbench.peer import count_reads, peer
from microbench.profile import Profile

SENT_LATE = 3
DRIVER_ERRORS = {
    2: "a request failed",
    4: "the prefix cache could not be reset",
    64: "the driver did not understand its plan",
}
# The last answer's work ends, then the server is watched.
SETTLE_S, IDLE_S = 0.5, 2.0


class TrialError(Exception):
    """The trial did not give a valid measurement; the message says why."""


@dataclass(frozen=True)
class TrialSpec:
    """One server lifetime to come: the `repeat`-th of a config.

    `overlay` patches vLLM; `patches` are the hashes of what is in it; `error` says why
    the trial cannot be run. The first server of a config that `grows` has growth and
    plateau. Where py-spy looks on, `sampled`, nothing is measured. A
    server that `starts_cold` is not forked.
    """

    config: str
    connector: Connector
    profile: Profile
    model: Checkpoint
    installed: Installation
    overlay: Path
    patches: dict[str, str]
    error: str | None = None
    repeat: int = 0
    grows: bool = False
    sampled: bool = False
    starts_cold: bool = False

    @property
    def folder(self) -> Path:
        """Folder of the trial's records, below the run's."""
        return Path(self.config, f"r{self.repeat}")

    @property
    def is_first(self) -> bool:
        """Return whether this is the first server of its config."""
        return self.repeat == 0

    def server(self, folder: Path, connector: Connector) -> ServerSpec:
        """Specify the server, with its files in `folder`. Raises ServerError."""
        label = {
            "config": self.config,
            "repeat": self.repeat,
            "patches": self.patches,
        }
        spec = resolve(
            connector,
            self.profile,
            self.model.folder,
            folder,
            label,
            overlay=self.overlay,
            installed=self.installed,
        ).with_options(KVTAX_FORWARDS=str(folder / FORWARDS))
        if self.starts_cold:
            return dataclasses.replace(spec, starts_cold=True)
        return spec


@dataclass
class _TrialFacts:
    """Facts of a trial, as far as it came."""

    ready_s: float | None = None
    cold_start: str | None = None
    pss_mib: float | None = None
    reads: ReadCounts | None = None
    idle: IdleCost | None = None
    machine: MachineLoad | None = None


def run_trial(folder: Path, spec: TrialSpec) -> TrialRecord:
    """Fill `folder` with one server lifetime's records and its trial.json.

    A trial that goes wrong comes back with status "failed" and its error; its
    records stay where they are.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    started = time.monotonic()
    facts, error = _TrialFacts(), spec.error
    if error is None:
        try:
            _measure(folder, spec, facts)
        except (
            ServerError,
            PortsError,
            TrialError,
            RecordsError,
            SamplingError,
        ) as failure:
            error = str(failure)
    record = TrialRecord(
        config=spec.config,
        repeat=spec.repeat,
        connector_config=published(spec.connector.kv_transfer_config, "own"),
        patches=spec.patches,
        num_blocks=spec.profile.num_blocks,
        block_size=spec.profile.block_size,
        status="ok" if error is None else "failed",
        error=error,
        started_utc=now if spec.error is None else None,
        wall_s=time.monotonic() - started if spec.error is None else None,
        **vars(facts),
    )
    write_document(folder / "trial.json", record)
    return record


def read_finished(folder: Path, spec: TrialSpec) -> TrialRecord | None:
    """Read the record of this trial from an earlier sweep, if it is ok."""
    try:
        done = read_document(folder / "trial.json", TrialRecord)
    except RecordsError:
        return None
    return done if done.status == "ok" and done.patches == spec.patches else None


def _measure(folder: Path, spec: TrialSpec, facts: _TrialFacts) -> None:
    """Run server and driver; note in `facts` what there was.

    Raises the errors that run_trial catches.
    """
    profile = spec.profile
    grows = spec.is_first and spec.grows
    plan = profile.plan(SERVED_MODEL, spec.model.vocab_size, spec.repeat, grows)
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    began_ns, cpu_s = 0, 0.0
    with contextlib.ExitStack() as stack:
        connector = stack.enter_context(
            accompanied(spec.connector, folder, spec.installed)
        )
        server = stack.enter_context(Server(spec.server(folder, connector)))
        facts.ready_s = server.wait_ready()
        facts.cold_start = server.cold_start
        before = Clocks.read(server)
        with peer(folder, connector, profile.block_size, server.ports):
            _drive(folder, server, spec.sampled)
        facts.machine = before.load_until(Clocks.read(server))
        if spec.is_first:
            began_ns, cpu_s = _watch_idle(server)
        facts.pss_mib = server.pss_mib()
    if spec.is_first:
        facts.idle = IdleCost(IDLE_S, cpu_s, _steps_of_idle(folder, began_ns))
    _check_fresh(folder, profile)
    if connector.reads_per_s is not None:
        facts.reads = count_reads(folder)


def _drive(folder: Path, server: Server, sampled: bool) -> None:
    command = [sys.executable, "-m", "microbench.driver", server.url]
    command += [str(folder / "plan.json"), str(folder / "requests.jsonl")]
    command += [str(server.supervised.supervisor_pid)]
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(
            Supervised(command, dict(os.environ), folder / "driver.log")
        )
        sampler = Sampler(server, folder) if sampled else None
        if sampler:
            stack.enter_context(sampler)
        while (status := driver.poll()) is None:
            if server.supervised.poll() is not None:
                raise TrialError(
                    f"the server died under load\n{tail(folder / 'server.log')}"
                )
            time.sleep(0.1)
        if sampler:
            sampler.finish()
    # Late requests spoil growth and latencies, which then do not count (LoadedTrial),
    # and not what is held.
    if status not in (0, SENT_LATE):
        raise TrialError(
            DRIVER_ERRORS.get(status, f"the driver ended with status {status}")
            + f"\n{tail(folder / 'driver.log')}"
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


def _check_fresh(folder: Path, profile: Profile) -> None:
    """Check that the first engine step found only its own prompt in the cache."""
    first = first_step(only_life(folder) / "engine_step.jsonl")
    blocks = None if first is None else first.found_blocks(profile.block_size)
    if first is None or blocks is None:
        raise TrialError(
            "the engine did not record what its first step found cached: does the "
            "config have the patch step_timing_v2?"
        )
    if first.step_id != 0 or blocks > 0:
        raise TrialError(
            f"the server was not fresh: its first step (id {first.step_id}) found "
            f"{blocks} cached blocks that it did not bring itself"
        )
