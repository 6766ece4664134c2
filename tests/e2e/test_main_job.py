# SPDX-License-Identifier: Apache-2.0
"""The main job on real vLLM: what it finds, and what it leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvtax.engine.installation import installation
from kvtax.paths import REPOSITORY
from kvtax.proc.supervise import descendants
from kvtax.records.files import read_document
from kvtax.records.observatory_cell import CellRecord
from kvtax.records.steps import only_life
from kvtax.verdict.axes import growth
from tests.proc.living import eventually, gone
from tests.releases import bare_environment
from tests.test_wheel import UV, built

pytestmark = pytest.mark.e2e

RUN_ALL = ["bash", str(REPOSITORY / "run_all.sh")]
# One server each: that a config without a verdict gets another is of test_sweep.py.
SMOKE = [*RUN_ALL, "--profile", "cpu-smoke", "--repeats", "1"]
# Until a server that does not come is given up.
STARTED_S = 480.0


def swept(test):
    """Mark a test of a sweep, which measures."""
    return pytest.mark.serial(pytest.mark.timeout(3_600)(test))


def package_digest(name: str) -> str:
    digest = hashlib.sha256()
    for file in sorted(installation().package(name).rglob("*.py")):
        digest.update(str(file).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Sweep:
    """How a cpu-smoke sweep ended, and what was in its folder then."""

    folder: Path
    status: int
    configs: dict
    summary: str
    trials: dict[str, Trial]
    disturbed: list[str]


@dataclass(frozen=True)
class Trial:
    status: str
    written_ns: int


@pytest.fixture(scope="module")
def hurt(tmp_path_factory) -> Sweep:
    """The sweep whose `noop` server was killed while it measured."""
    folder = tmp_path_factory.mktemp("sweep")
    sweep = subprocess.Popen([*SMOKE, "--out", folder])
    try:
        trial = folder / "noop" / "r0"

        def records() -> Path:
            return only_life(trial) / "engine_step.jsonl"

        def recorded_some_steps() -> bool:
            assert sweep.poll() is None, "the sweep ended before it measured"
            return records().exists() and records().stat().st_size > 10_000

        eventually(recorded_some_steps, STARTED_S)
        header = json.loads(records().read_text().partition("\n")[0])
        os.kill(header["pid"], signal.SIGKILL)
        return ended(folder, sweep.wait(1_800))
    finally:
        # Also where the tests are interrupted.
        sweep.terminate()
        sweep.wait()


@pytest.fixture(scope="module")
def whole(hurt) -> Sweep:
    """The same sweep, resumed; the installed packages must come out untouched."""
    packages = ("vllm", "nixl_cu12")
    before = [package_digest(name) for name in packages]
    resumed = subprocess.run(
        [*SMOKE, "--out", hurt.folder, "--resume"], check=False, timeout=1_800
    )
    assert [package_digest(name) for name in packages] == before
    return ended(hurt.folder, resumed.returncode)


def ended(folder: Path, status: int) -> Sweep:
    trials = {
        "/".join(file.parts[-3:-1]): Trial(
            json.loads(file.read_bytes())["status"], file.stat().st_mtime_ns
        )
        for file in folder.glob("*/r*/trial.json")
    }
    result = json.loads((folder / "per_config.json").read_text())
    summary = (folder / "SUMMARY.md").read_text()
    servers = result["machine"]["servers"]
    disturbed = [server["left_out"] for server in servers if server["left_out"]]
    return Sweep(folder, status, result["configs"], summary, trials, disturbed)


@pytest.fixture(scope="module")
def configs(whole) -> dict:
    assert whole.status == 0
    return whole.configs


@pytest.fixture(scope="module")
def judged(whole, configs) -> dict:
    """The configs of a sweep in which every server had its cores."""
    if whole.disturbed:
        pytest.skip(f"the sweep leaves servers out: {'; '.join(whole.disturbed)}")
    return configs


@swept
def test_the_hash_walk_grows_with_the_level_at_which_the_cache_is_held(judged):
    walk = judged["mooncake_both_hash_sync"]
    assert walk["verdict"] == "grows"
    # How steep it is depends on the machine.
    assert walk["full_adds"]["percent"]["ci95"][0] > 20
    held = walk["held"]["calls"]
    assert held["levels"][0] < held["levels"][2] < held["levels"][4]
    # A level is held as full as the profile says, though requests hold some blocks.
    shares = [blocks / 12_000 for blocks in held["cache_blocks"]]
    assert shares == pytest.approx([0.0, 0.3, 0.6, 0.92, 1.0], abs=0.05)


@swept
@pytest.mark.parametrize("name", ["plain", "noop"])
def test_configs_without_the_walk_grow_at_most_a_third_as_fast(judged, name):
    # One server each tells them from the walk by far.
    walk, other = (
        judged[config]["held"]["timed"]["full_adds"]["ci95"]
        for config in ("mooncake_both_hash_sync", name)
    )
    assert other[1] < walk[0] / 3


@swept
def test_the_walk_is_found_in_build_connector_meta(configs):
    walk, noop = configs["mooncake_both_hash_sync"], configs["noop"]
    assert walk["build_meta_us"]["p50"] > 20 * noop["build_meta_us"]["p50"]
    assert walk["build_meta_us"]["p50"] > 0.5 * walk["schedule_us"]["p50"]
    assert configs["plain"]["build_meta_us"] is None


@swept
def test_the_cache_grew_from_empty_to_the_ceiling(configs):
    for config in configs.values():
        # The prompts that hit lie in the cache at the empty level, too: two of 256
        # blocks, within the share that a level may be off.
        assert config["cache_blocks"]["min"] <= 0.05 * 12_000
        assert config["cache_blocks"]["max"] >= 11_900


@swept
def test_every_scheduled_request_has_exactly_one_outcome(configs):
    for config in configs.values():
        requests = config["requests"]
        assert requests["ok"] == requests["scheduled"] > 0
        assert requests["failed"] == requests["cancelled"] == 0


@swept
def test_every_engine_step_has_its_worker_step(configs):
    for config in configs.values():
        records = config["records"]
        assert records["engine_steps"] > 1000
        # The last step of a server's life may have lost it.
        assert records["engine_without_worker"] <= config["n_repeats"]
        assert records["torn_lines"] == 0


@swept
def test_the_trees_are_gone_and_no_server_is_left(whole):
    assert not (whole.folder / "overlays").exists()
    assert not [pid for pid in descendants(1) if belongs_to(pid, whole.folder)]


@swept
def test_a_server_that_dies_fails_its_config_and_not_the_others(hurt):
    """Neither the one before it nor the one after."""
    assert hurt.status == 3
    noop = hurt.configs["noop"]
    assert "r0: the server died" in noop["error"]
    assert (noop["verdict"], noop["n_repeats"]) == ("failed", 0)
    lost = noop["requests"]
    assert lost["scheduled"] == lost["ok"] + lost["failed"] + lost["cancelled"]
    assert "`noop`: failed: r0: the server died" in hurt.summary
    for name in ("plain", "mooncake_both_hash_sync"):
        requests = hurt.configs[name]["requests"]
        assert requests["ok"] == requests["scheduled"] > 0


@swept
def test_a_resumed_run_measures_what_failed_and_nothing_twice(hurt, whole):
    failed = {name for name, trial in hurt.trials.items() if trial.status != "ok"}
    again = {name for name in hurt.trials if hurt.trials[name] != whole.trials[name]}
    assert again == failed
    assert "noop/r0" in failed and len(failed) < len(hurt.trials)


@swept
@pytest.mark.long  # test_supervise.py shows it of any server, test_run_command of vLLM
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_a_sweep_stopped_in_the_middle_leaves_no_process_and_no_port(
    tmp_path, number, status
):
    before = package_digest("vllm")
    arguments = ["--profile", "cpu-smoke", "--only", "mooncake_both", "--out", tmp_path]
    sweep = subprocess.Popen(
        [sys.executable, "-m", "kvtax", "sweep", *arguments], cwd=REPOSITORY
    )
    requests = tmp_path / "mooncake_both" / "r0" / "requests.jsonl"
    eventually(lambda: requests.exists() and requests.stat().st_size > 0, STARTED_S)
    processes = descendants(sweep.pid)
    ports = listening_ports(processes)
    assert len(processes) >= 4 and ports

    os.kill(sweep.pid, number)
    assert sweep.wait(STARTED_S) == status
    eventually(lambda: gone(processes))
    for port in ports:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("0.0.0.0", port))
    assert package_digest("vllm") == before


def belongs_to(pid: int, folder: Path) -> bool:
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def listening_ports(processes: list[int]) -> set[int]:
    ports = set()
    for pid in processes:
        with suppress(psutil.NoSuchProcess):
            connections = psutil.Process(pid).net_connections("inet4")
            ports |= {of.laddr.port for of in connections if of.status == "LISTEN"}
    return ports


@swept
def test_the_sweep_ends_with_a_page_that_has_every_verdict(whole, configs):
    text = (whole.folder / "report.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    (shown,) = (entry for entry in data["sections"] if "verdicts" in entry)
    given = {entry["name"]: entry["verdict"] for entry in shown["verdicts"]}
    assert given == {name: config["verdict"] for name, config in configs.items()}


@swept
@pytest.mark.long
@pytest.mark.timeout(7_200)
def test_every_synthetic_cost_gets_its_expected_verdict(tmp_path):
    command = [*RUN_ALL, "--profile", "synthetic", "--out", tmp_path / "run"]
    sweep = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    named = [line for line in sweep.stdout.splitlines() if ": expected " in line]
    assert sweep.returncode == 0, "\n".join(named) or sweep.stdout


# 60 us per step and 1,000 cached blocks. No hook of 0.18.1 gives it the block pool, so
# it looks for the scheduler that calls it.
GROWS_WITH_CACHE = """
import sys, time
from connectors.noop import NoopConnector

def block_pool():
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "kv_cache_manager"):
        frame = frame.f_back
    return frame.f_locals["self"].kv_cache_manager.block_pool

class Mine(NoopConnector):
    def build_connector_meta(self, scheduler_output):
        cached = len(block_pool().cached_block_hash_to_block)
        until = time.perf_counter() + 60e-9 * cached
        while time.perf_counter() < until:
            pass
        return super().build_connector_meta(scheduler_output)
"""
SWEEP_LIMITS = """
[configs.Mine]
verdicts = ["flat"]
full_adds = { "scheduler.build_connector_meta" = 5.0 }
"""


@pytest.fixture
def their_venv(tmp_path) -> Path:
    """An environment of somebody else, with our packages."""
    venv = tmp_path / "venv"
    packages = bare_environment(venv)
    (packages / "theirs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for library in Path(sys.prefix, "lib").glob("*.so*"):
        (venv / "lib" / library.name).symlink_to(library)
    return venv


@pytest.mark.long
def test_a_connector_that_grows_breaks_its_limits_and_the_python_keeps_every_byte(
    their_venv, tmp_path
):
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "kv.py").write_text(GROWS_WITH_CACHE)
    limits = tmp_path / "limits.toml"
    limits.write_text(SWEEP_LIMITS)
    before = {path: path.lstat().st_mtime_ns for path in their_venv.rglob("*")}
    ours = {path: path.stat().st_mtime_ns for path in packages_of_vllm()}
    given = ["--profile", "cpu-smoke", "--repeats", "2", "--out", tmp_path / "run"]
    given += ["--python", their_venv / "bin" / "python", "--limits", limits]
    given += ["--connector", "mypkg.kv:Mine"]
    sweep = subprocess.run(
        ["bash", REPOSITORY / "run_all.sh", *given],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert sweep.returncode == 1, sweep.stderr
    assert (
        "`Mine`: verdict is grows, `scheduler.build_connector_meta` +" in sweep.stdout
    )
    assert {path: path.lstat().st_mtime_ns for path in their_venv.rglob("*")} == before
    assert {path: path.stat().st_mtime_ns for path in packages_of_vllm()} == ours


def packages_of_vllm() -> list[Path]:
    """All files of the installed vLLM."""
    folder = Path(sysconfig.get_path("purelib"), "vllm")
    return [path for path in folder.rglob("*") if path.is_file()]


# 5 us per running request.
GROWS_WITH_RUNNING = """
import time
from connectors.noop import NoopConnector

class Mine(NoopConnector):
    def build_connector_meta(self, scheduler_output):
        until = time.perf_counter() + 5e-6 * len(scheduler_output.num_scheduled_tokens)
        while time.perf_counter() < until:
            pass
        return super().build_connector_meta(scheduler_output)
"""
GATE_LIMITS = '[axes.running]\nshape = { connector = "flat" }\n'


@pytest.fixture(scope="module")
def venv(tmp_path_factory) -> Path:
    """An environment with vLLM and the wheel, outside of the checkout."""
    folder = tmp_path_factory.mktemp("author")
    venv = folder / "venv"
    python = str(venv / "bin" / "python")
    install = [UV, "pip", "install", "-q", "--python", python]
    subprocess.run([UV, "venv", "-q", "--python", "3.11", str(venv)], check=True)
    subprocess.run(
        [*install, "--no-deps", "-r", str(REPOSITORY / "locks" / "cpu.txt")], check=True
    )
    subprocess.run([*install, str(built(folder / "wheel"))], check=True)
    return venv


@pytest.fixture
def gate(venv, tmp_path):
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "kv.py").write_text(GROWS_WITH_RUNNING)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [venv / "bin" / "kvtax", "gate", *map(str, arguments)],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.long
@pytest.mark.serial
def test_a_connector_in_the_working_folder_breaks_its_limit(gate, venv, tmp_path):
    vllm = next(venv.glob("lib/python*/site-packages/vllm"))
    before = {path: path.stat().st_mtime_ns for path in vllm.rglob("*")}
    (tmp_path / "limits.toml").write_text(GATE_LIMITS)
    out = tmp_path / "cell.json"
    run = gate("mypkg.kv:Mine", "--limits", "limits.toml", "--out", out)
    assert run.returncode == 1, run.stderr
    cell = read_document(out, CellRecord)
    grown = growth(cell, "running", "scheduler.build_connector_meta_us")
    assert grown and grown.slope.ci95[0] > 4
    assert cell.provenance["git_commit"] is None
    assert {path: path.stat().st_mtime_ns for path in vllm.rglob("*")} == before


@pytest.mark.long
@pytest.mark.serial
def test_exit_codes_tell_bad_input_from_what_did_not_start(gate):
    assert gate("mypkg.kv:Missing").returncode == 3
    assert gate("no colon or name").returncode == 2
    assert gate("mypkg.kv:Mine", "--vllm", "0.32.0").returncode == 2
    assert gate("mypkg.kv:Mine", "--python", "/bin/false").returncode == 2
