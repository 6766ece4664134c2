# SPDX-License-Identifier: Apache-2.0
"""kvtax-probe as a plugin of untouched servers: each engine and each life is whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvtax.cli import main
from kvtax.cli.demo import ASIDE
from kvtax.engine import releases
from kvtax.engine.connector import Connector
from kvtax.engine.installation import Installation
from kvtax.engine.server import READY_DEADLINE_S, Server, http_ok, resolve, tail
from kvtax.look.discover import discover
from kvtax.look.instance_summary import cost
from kvtax.look.instances import Instance, read_instance
from kvtax.paths import REPOSITORY
from kvtax.proc.loopback import NAMES
from kvtax.proc.ports import LOOPBACK
from kvtax.proc.supervise import descendants, signal_all
from kvtax.proc.user_files import runtime_folder
from kvtax.records.files import read_lines
from kvtax.records.requests import read_engine_requests
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
from tests.e2e.doors import DOORS, TOKENS, await_written, complete, through, unrecorded
from tests.harness.tiny import KV_TRANSFER, MAX_TOKENS, tiny_settings, write_checkpoint
from tests.look.by_line import figures
from tests.proc.living import eventually, gone
from tests.releases import INSTALLED, under_test

pytestmark = pytest.mark.e2e

REQUESTS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint", seed=1)


@contextmanager
def serving(
    folder: Path, checkpoint: Path, *arguments: str, **settings: int
) -> Iterator[Server]:
    """An untouched vLLM with the plugin, which records to folder/records."""
    server = unrecorded(folder, checkpoint, under_test(), **settings).with_options(
        *arguments
    )
    with Server(through("plugin", server, folder, under_test())) as started:
        started.wait_ready()
        yield started


def complete_all(server: Server) -> None:
    """Send REQUESTS requests at once."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(complete, [server.url] * REQUESTS, range(REQUESTS)))


def check_lives(records: Path, count: int, ranks: int) -> int:
    """Each life has its engine's steps and its workers'; requests of all lives."""
    discovered, warnings = discover(records)
    assert warnings == []
    assert len(discovered) == count
    requests = 0
    for each in discovered:
        instance = read_instance(each)
        assert not [w for w in instance.warnings if w.kind != "few_steps"]
        steps = instance.steps
        check_figures(instance, each.path.parent)
        assert steps["execute_model_us"].is_not_null().all()
        assert (steps["model_us"] > 0).all()
        life = each.path.parent
        assert len(list(life.glob("worker_step.r*.jsonl"))) == ranks
        ended = read_engine_requests(life / "engine_request.jsonl").records
        # A step that brings a prompt's tokens brings the first of the answer.
        decoded = sum(request.output_tokens - 1 for request in ended)
        assert steps["decode_tokens"].sum() == decoded
        requests += len(ended)
    return requests


def check_figures(instance: Instance, life: Path) -> None:
    """What look says of the life is what its lines add up to."""
    expected, computed = figures(life), cost(instance)
    assert (computed.steps, computed.worker_steps) == expected[:2]
    assert computed.step.mean_us == pytest.approx(expected.step_us, rel=1e-4)
    # What overlaps with the last step is not known.
    rel = 0.01 + 1 / expected.steps
    assert computed.connector.share == pytest.approx(expected.share, rel=rel)
    means_us = {part.name: part.mean_us for part in computed.methods if part.mean_us}
    assert means_us == pytest.approx(expected.methods_us, rel=1e-3)


@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=pytest.mark.long)])
def test_data_parallel_engines_and_a_restart_are_whole(checkpoint, tmp_path, starts):
    for start in range(1, starts + 1):
        with serving(tmp_path, checkpoint, data_parallel=2) as server:
            complete_all(server)
        requests = check_lives(tmp_path / "records", 2 * start, ranks=1)
        assert requests == start * REQUESTS
    discovered, _ = discover(tmp_path / "records")
    assert sorted(source.header.dp_rank for source in discovered) == sorted(
        [0, 1] * starts
    )


@pytest.mark.long
def test_a_killed_server_that_starts_again_with_more_workers_has_two_lives(
    checkpoint, tmp_path
):
    with serving(tmp_path, checkpoint) as server:
        complete_all(server)
        await_written(tmp_path / "records", REQUESTS)
        signal_all(server.supervised.pids(), signal.SIGKILL)
    with serving(tmp_path, checkpoint, "--tensor-parallel-size", "2") as server:
        complete_all(server)
    discovered, warnings = discover(tmp_path / "records")
    assert warnings == []
    for each, ranks in zip(discovered, (1, 2), strict=True):
        assert len(list(each.path.parent.glob("worker_step.r*.jsonl"))) == ranks
        instance = read_instance(each)
        assert not [w for w in instance.warnings if w.kind != "few_steps"]
        # A killed worker has not written its last step.
        assert instance.steps["execute_model_us"][:-1].is_not_null().all()
        assert instance.requests.height == REQUESTS


@pytest.mark.parametrize(
    "way", [pytest.param("tensor", marks=pytest.mark.long), "pipeline"]
)
def test_every_worker_of_a_parallel_engine_is_recorded(checkpoint, tmp_path, way):
    parallel = (f"--{way}-parallel-size", "2")
    with serving(tmp_path, checkpoint, *parallel) as server:
        complete_all(server)
    assert check_lives(tmp_path / "records", 1, ranks=2) == REQUESTS


DOOR_REQUESTS = 16
FILES = ("engine_step", "worker_step.r0", "engine_request", "threads")
# What a header says of one life alone.
OF_A_LIFE = {"life", "pid", "began_ns", "began_unix_ns"}
ENGINE_TIMES = ("schedule_us", "update_us", "step_us", "build_meta_us")
# The fastest steps of two servers are closer than this factor.
NOISE = 2.0
NEWEST = releases.tested_releases()[-1]
RELEASES = [INSTALLED, pytest.param(NEWEST, marks=pytest.mark.long)]


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
            values = [getattr(step, name) for step in steps]
            times_us[name] = [us for us in values if us is not None]
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
OPEN = {"/tmp", "/var/tmp", "/dev/shm", tempfile.gettempdir()}


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
        for number in range(DOOR_REQUESTS):
            for server in servers:
                complete(server.url, number)
        for door in DOORS:
            await_written(
                folder / door / "records", DOOR_REQUESTS, DOOR_REQUESTS * TOKENS
            )
        stack.close()
        new = files_of_nobody() - files
        written = {path for path in new if not path.is_relative_to(scratch)}
        is_untouched = modified(installed) == tree
        yield Served(release, folder, written if are_nobody else None, is_untouched)


def files_of_nobody() -> set[Path]:
    find = ["find", *OPEN, "-xdev", "-user", str(NOBODY)]
    # A file may go while find looks at it.
    listed = subprocess.run(find, stdout=subprocess.PIPE, text=True, check=False)
    return {Path(line) for line in listed.stdout.splitlines()}


def modified(installed: Installation) -> dict[Path, int]:
    tree = installed.package("vllm").rglob("*")
    return {path: path.stat().st_mtime_ns for path in tree}


def test_all_doors_give_the_same_records(served):
    plugin, *others = map(served.recorded, DOORS)
    assert plugin.headers["engine_step"]["vllm_version"] == served.release
    steps = DOOR_REQUESTS * TOKENS
    assert plugin.counts["requests"] == DOOR_REQUESTS
    assert plugin.counts["scheduler"] == plugin.counts["worker"] == steps
    for side, fields in METHOD_FIELDS.items():
        # Constant methods of the no-op connector are not timed.
        assert {plugin.counts[f"{side}.{method}"] for method in fields} <= {steps, 0}
    for other in others:
        for name, header in plugin.headers.items():
            # What a wrapper takes is measured by each process.
            measured = {"wrapper_us": header.get("wrapper_us")}
            same = other.headers[name] | measured
            assert list(same.items()) == list((header | measured).items())
        assert other.fields == plugin.fields
        assert other.counts == plugin.counts
        for name, times_us in plugin.times_us.items():
            # A busy machine makes steps slower, and not the fastest one.
            least = [min(us, default=1) for us in (times_us, other.times_us[name])]
            assert max(least) < NOISE * min(least), (name, least)


def test_a_vllm_that_its_users_may_not_write_is_recorded_and_stays_as_it_is(served):
    if served.written is None:
        pytest.skip("this user may not start a process as another one")
    assert served.is_untouched
    theirs = [served.folder / door / "records" for door in OF_NOBODY]
    assert served.written == {f for place in theirs for f in (place, *place.rglob("*"))}


FIX = "mooncake_get_finished_short_circuit"
END_S = 300.0


@pytest.fixture
def scratch():
    # Not tmp_path: vLLM has its sockets there, and their paths have 107 bytes at most.
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_server_is_patched_and_recorded_and_leaves_nothing(tmp_path, scratch):
    installed = under_test()
    connector = Connector(
        "", [], kv_transfer_config=KV_TRANSFER["mooncake"] | {"kv_role": "kv_both"}
    )
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=1)
    settings = tiny_settings(MAX_TOKENS, 8)
    server = resolve(connector, settings, checkpoint, tmp_path, {}, installed=installed)
    vllm = installed.package("vllm")
    before = {path: path.read_bytes() for path in vllm.rglob("*.py")}
    records = tmp_path / "records"
    earlier = set(runtime_folder().glob("kvtax-run-*"))
    run = [sys.executable, "-m", "kvtax", "run", "--records", str(records)]
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            [*run, "--fix", FIX, "mooncake_cpu_layout", "--", *server.argv],
            env=server.env | {"TMPDIR": str(scratch)},
            cwd=REPOSITORY,
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{server.ports.http}"
        wait_ready(process, url, server.log)
        complete(url, 0)
        (overlay,) = set(runtime_folder().glob("kvtax-run-*")) - earlier
        # Code that a process has imported.
        assert [*overlay.rglob("mooncake_connector.py.*.code")]
        processes = [process.pid, *descendants(process.pid)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0, tail(server.log)
        assert gone(processes)
        assert not overlay.exists()
    finally:
        process.kill()
    text = server.log.read_text()
    assert (
        f"in {vllm.resolve()} gets {FIX}, mooncake_cpu_layout, step_timing_v2" in text
    )
    assert {path: path.read_bytes() for path in vllm.rglob("*.py")} == before
    (discovered,), warnings = discover(records)
    assert warnings == []
    steps = read_instance(discovered).steps
    assert steps["decode_tokens"].sum() >= 7
    assert steps["worker.get_finished_us"].is_not_null().any()


def wait_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline_s = time.monotonic() + READY_DEADLINE_S
    while not http_ok(f"{url}/health"):
        assert process.poll() is None, tail(log)
        assert time.monotonic() < deadline_s, tail(log)
        time.sleep(0.2)


def test_the_demo_records_a_server_of_its_own_and_leaves_nothing_else(
    tmp_path, monkeypatch, capsys
):
    # As in a company's network; Mooncake's worker asks its own server by HTTP, too.
    monkeypatch.setenv("http_proxy", f"http://{LOOPBACK}:9")
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    # The paths of vLLM's sockets are at most 107 characters long.
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert main(["demo", "--serve", "--out", str(tmp_path / "demo")]) == 0
        assert list(Path(short).iterdir()) == []
    shown = capsys.readouterr().out
    assert "48 requests" in " ".join(shown.split())
    assert "MooncakeConnector of vLLM 0.18.1 adds" in " ".join(shown.split())
    assert (tmp_path / "demo" / "look.html").is_file()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_a_demo_server_that_is_stopped_leaves_nothing_that_runs(tmp_path, number):
    command = [sys.executable, "-m", "kvtax", "demo", "--serve", "--out", "demo"]
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | {"TMPDIR": short, "PYTHONPATH": str(REPOSITORY)},
        ) as demo:
            eventually(lambda: [*tmp_path.rglob("engine_step.jsonl")])
            pids = descendants(demo.pid)
            demo.send_signal(number)
        eventually(lambda: gone(pids))
        assert len(pids) > 2
        assert not (tmp_path / "demo").exists()
        left = [*tmp_path.iterdir(), *Path(short).iterdir()]
        if number == signal.SIGTERM:
            assert demo.returncode == 128 + number
            assert left == []
        # The next demo removes these.
        assert all(path.name.startswith(ASIDE) for path in left)
        segments = {path.name for path in Path("/dev/shm").glob("__KMP_*")}
        left = [f"__KMP_REGISTERED_LIB_{pid}_0" for pid in pids]
        assert segments.isdisjoint(left)
