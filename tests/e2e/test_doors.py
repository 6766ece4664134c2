# SPDX-License-Identifier: Apache-2.0
"""By whichever door the recorder comes into vLLM, it records the same."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvtax.engine import releases
from kvtax.engine.installation import Installation
from kvtax.engine.server import Server
from kvtax.records.files import read_lines
from kvtax.records.steps import (
    METHOD_FIELDS,
    WORKER_TIMES,
    EngineHeader,
    EngineStep,
    WorkerHeader,
    WorkerStep,
    calls_by_method,
    method_fields,
    only_life,
)
from tests.e2e.doors import (
    DOORS,
    TOKENS,
    await_written,
    complete,
    through,
    unrecorded,
)
from tests.harness.tiny.checkpoint import write_checkpoint
from tests.releases import INSTALLED, under_test

pytestmark = pytest.mark.e2e

REQUESTS = 16
FILES = ("engine_step", "worker_step.r0", "engine_request", "threads")
# What a header says of one life alone.
OF_A_LIFE = {"life", "pid", "began_ns", "began_unix_ns"}
ENGINE_TIMES = ("schedule_us", "update_us", "step_us", "build_meta_us")
# Medians of servers that take turns are closer than this factor.
NOISE = 2.0
NEWEST = releases.tested_releases()[-1]
RELEASES = [INSTALLED, pytest.param(NEWEST, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint", seed=1)


@dataclass
class Recorded:
    """Headers, names of fields, and what was counted and timed, of one engine's life.

    Steps that schedule nothing are left out: such a step ends a request, unless the
    next request has come by then.
    """

    headers: dict[str, dict]
    fields: dict[str, set[str]]
    counts: Counter[str]
    times_us: dict[str, list[float]]


def read(records: Path) -> Recorded:
    life = only_life(records)
    headers, fields = {}, {}
    for name in FILES:
        header, *lines = map(json.loads, (life / f"{name}.jsonl").open())
        headers[name] = {k: v for k, v in header.items() if k not in OF_A_LIFE}
        fields[name] = set().union(*lines)
        if name == "engine_request":
            requests = len(lines)
    engine = read_lines(life / "engine_step.jsonl", EngineHeader, EngineStep)
    worker = read_lines(life / "worker_step.r0.jsonl", WorkerHeader, WorkerStep)
    busy = {step.step_id for step in engine.records if step.scheduled}
    counts: Counter[str] = Counter(requests=requests)
    times_us: dict[str, list[float]] = {}
    sides = {"scheduler": (engine, ENGINE_TIMES), "worker": (worker, WORKER_TIMES)}
    for side, (file, names) in sides.items():
        steps = [step for step in file.records if step.step_id in busy]
        counts[side] = len(steps)
        for step in steps:
            calls, _ = calls_by_method(step, method_fields(side, file.header.methods))
            counts.update({f"{side}.{method}": n for method, n in calls.items()})
        for name in names:
            found = [getattr(step, name) for step in steps]
            times_us[name] = [us for us in found if us is not None]
    return Recorded(headers, fields, counts, times_us)


NOBODY = 65534
# May read what root may, such as a Python in root's home, and write nothing of it.
AS_NOBODY = [
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]
# The doors that need no copy of vLLM; their servers run as nobody, if they may.
OF_NOBODY = ("plugin", "run")
# Where anybody may write.
OPEN = ("/tmp", "/var/tmp", "/dev/shm")


@dataclass
class Served:
    """What the servers of all doors recorded, and left on the disk.

    `written`: files of nobody outside of the scratch folder, None if no server ran as
    nobody.
    """

    release: str
    folder: Path
    written: set[Path] | None
    is_untouched: bool

    def recorded(self, door: str) -> Recorded:
        return read(self.folder / door / "records")


@pytest.fixture(scope="module", params=RELEASES)
def served(request, checkpoint, tmp_path_factory) -> Iterator[Served]:
    release, folder = request.param, tmp_path_factory.mktemp("doors")
    installed = under_test() if release == INSTALLED else releases.release(release)
    # Not below `folder`: vLLM has its sockets there, and their paths have 107 bytes at
    # most.
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        are_nobody = subprocess.run([*AS_NOBODY, "true"], check=False).returncode == 0
        tree, files = modified(installed), files_of_nobody()
        servers = []
        for door in DOORS:
            (records := folder / door / "records").mkdir(parents=True)
            spec = unrecorded(folder / door, checkpoint, installed)
            spec = through(door, spec, folder / door, installed)
            if are_nobody and door in OF_NOBODY:
                os.chown(scratch, NOBODY, NOBODY)
                os.chown(records, NOBODY, NOBODY)
                names = ("HOME", "TMPDIR", "VLLM_RPC_BASE_PATH")
                places = [f"{name}={scratch}" for name in names]
                spec = replace(spec, argv=[*AS_NOBODY, "env", *places, *spec.argv])
            servers.append(stack.enter_context(Server(spec)))
        for server in servers:
            server.wait_ready()
        # In turn, so that a busy machine disturbs all alike.
        for number in range(REQUESTS):
            for server in servers:
                complete(server.url, number)
        for door in DOORS:
            await_written(folder / door / "records", REQUESTS, REQUESTS * TOKENS)
        stack.close()
        new = files_of_nobody() - files
        written = {path for path in new if not path.is_relative_to(scratch)}
        is_untouched = modified(installed) == tree
        yield Served(release, folder, written if are_nobody else None, is_untouched)


def files_of_nobody() -> set[Path]:
    find = ["find", *OPEN, "-xdev", "-user", str(NOBODY)]
    # A file may go while find looks at it.
    found = subprocess.run(find, stdout=subprocess.PIPE, text=True, check=False)
    return {Path(line) for line in found.stdout.splitlines()}


def modified(installed: Installation) -> dict[Path, int]:
    tree = installed.package("vllm").rglob("*")
    return {path: path.stat().st_mtime_ns for path in tree}


def test_all_doors_give_the_same_records(served):
    plugin, *others = map(served.recorded, DOORS)
    assert plugin.headers["engine_step"]["vllm_version"] == served.release
    steps = REQUESTS * TOKENS
    assert plugin.counts["requests"] == REQUESTS
    assert plugin.counts["scheduler"] == plugin.counts["worker"] == steps
    for side, fields in METHOD_FIELDS.items():
        assert {plugin.counts[f"{side}.{method}"] for method in fields} <= {steps, 0}
        assert any(plugin.counts[f"{side}.{method}"] for method in fields)
    for other in others:
        for name, header in plugin.headers.items():
            assert list(other.headers[name].items()) == list(header.items())
        assert other.fields == plugin.fields
        assert other.counts == plugin.counts
        for name, times_us in plugin.times_us.items():
            medians = [statistics.median(us) for us in (times_us, other.times_us[name])]
            assert max(medians) < NOISE * min(medians), (name, medians)


def test_a_vllm_that_its_users_may_not_write_is_recorded_and_stays_as_it_is(served):
    if served.written is None:
        pytest.skip("this user may not start a process as another one")
    assert served.is_untouched
    theirs = [served.folder / door / "records" for door in OF_NOBODY]
    assert served.written == {f for one in theirs for f in (one, *one.rglob("*"))}
