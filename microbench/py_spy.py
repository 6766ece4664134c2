# SPDX-License-Identifier: Apache-2.0
"""Sample what a recording server is doing: stacks.<pid>.json beside its steps.

    python -m microbench.py_spy /records --seconds 20

Each sample stops the process for some hundred microseconds, or milliseconds where it
has much native code. So nothing is measured meanwhile; `look` shows shares.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from kvtax.engine.server import tail
from kvtax.proc.supervise import Supervised
from kvtax.records import RecordsError
from kvtax.records.files import read_header, write_whole
from kvtax.records.life import only_life
from kvtax.records.stacks import SampledStacks
from kvtax.records.steps import EngineHeader, WorkerHeader
from kvtax.signals import exit_on_signals
from microbench.py_spy_output import LOGGED, NotUnderstood, sampled

# Each sample stops the process, for up to 10 ms where there are ten threads.
RATE_HZ = 25
# What py-spy takes to begin, and to find the symbols of native code.
GRACE_S = 60.0


class SamplingError(Exception):
    """A process could not be sampled; the message says why."""


def processes(folder: Path) -> list[int]:
    """Find the engine and the workers whose records are in `folder`, each once.

    Raises RecordsError if there are none, or one does not say which process it is.
    """
    kinds: dict[str, type[EngineHeader | WorkerHeader]] = {
        "engine_step*.jsonl": EngineHeader,
        "worker_step*.jsonl": WorkerHeader,
    }
    found = [
        (path, read_header(path, kind).pid)
        for pattern, kind in kinds.items()
        for path in sorted(folder.glob(pattern))
    ]
    if not found:
        raise RecordsError(
            f"{folder}: no engine_step.jsonl: give the folder to which a server writes "
            "its records now, and send it a request first"
        )
    for path, pid in found:
        if pid is None:
            raise RecordsError(f"{path}: its header names no process")
    return sorted({pid for _, pid in found if pid is not None})


class Sampler:
    """py-spy on each of `pids`, from now on for `seconds`; a context that ends it.

    `result` waits for that, and writes the files into `folder`.
    """

    def __init__(self, pids: list[int], folder: Path, seconds: float) -> None:
        self._folder = folder
        self._pids = pids
        self._seconds = math.ceil(seconds)
        self._running: dict[int, Supervised] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Sampler:
        for pid in self._pids:
            log = self._log(pid)
            log.unlink(missing_ok=True)
            # The log says when each sample was taken.
            env = os.environ | {"RUST_LOG": LOGGED}
            self._running[pid] = self._stack.enter_context(
                Supervised(self._command(pid), env, log)
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        for pid in self._pids:
            self._samples(pid).unlink(missing_ok=True)

    def result(self) -> list[Path]:
        """Return the files. Raises SamplingError."""
        deadline_s = time.monotonic() + self._seconds + GRACE_S
        return [self._result(pid, deadline_s) for pid in self._pids]

    def _result(self, pid: int, deadline_s: float) -> Path:
        running, log = self._running[pid], self._log(pid)
        while (status := running.poll()) is None:
            if time.monotonic() > deadline_s:
                raise SamplingError(f"py-spy did not end\n{tail(log)}")
            time.sleep(0.1)
        if status != 0 or not self._samples(pid).exists():
            raise SamplingError(
                f"py-spy cannot sample process {pid}: run as its user, and as root "
                f"where ptrace is restricted\n{tail(log)}"
            )
        try:
            found = sampled(self._samples(pid).read_bytes(), log.read_text())
        except NotUnderstood as error:
            raise SamplingError(f"{log}: {error}") from None
        since_boot_ns = time.time_ns() - time.perf_counter_ns()
        for sample in found.samples:
            sample.t_ns -= since_boot_ns
        document = SampledStacks(
            pid=pid,
            rate_hz=RATE_HZ,
            py_spy=importlib.metadata.version("py-spy"),
            **vars(found),
        )
        path = self._folder / f"stacks.{pid}.json"
        write_whole(path, msgspec.json.encode(document))
        log.unlink()
        return path

    def _command(self, pid: int) -> list[str]:
        command = [str(Path(sys.executable).with_name("py-spy")), "record"]
        command += ["--pid", str(pid), "--duration", str(self._seconds)]
        command += ["--rate", str(RATE_HZ), "--format", "speedscope"]
        # Who waits is what is looked for. Functions, not each of their lines.
        command += ["--idle", "--threads", "--native", "--function"]
        return [*command, "--output", str(self._samples(pid))]

    def _samples(self, pid: int) -> Path:
        return self._folder / f"py_spy.{pid}.json"

    def _log(self, pid: int) -> Path:
        return self._folder / f"py_spy.{pid}.log"


def main() -> int:
    """Exit status 0, or 1 with a message if nothing could be sampled."""
    parser = argparse.ArgumentParser(
        prog="python -m microbench.py_spy", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the server writes its records")
    parser.add_argument("--seconds", type=float, default=20.0, help="default: 20")
    chosen = parser.parse_args()
    exit_on_signals()
    try:
        if chosen.seconds <= 0:
            raise SamplingError(f"--seconds {chosen.seconds:g}: must be above 0")
        life = only_life(chosen.folder)
        with Sampler(processes(life), life, chosen.seconds) as sampler:
            written = sampler.result()
    except (RecordsError, SamplingError) as error:
        print(f"py_spy: {error}", file=sys.stderr)
        return 1
    print(f"wrote {', '.join(map(str, written))}")
    print(f"kvtax look {chosen.folder} shows them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
