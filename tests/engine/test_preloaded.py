# SPDX-License-Identifier: Apache-2.0
"""A command that a zygote forked is like one that was started cold, and as mortal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtax.engine import preloaded
from kvtax.engine.preloaded import Preloaded
from kvtax.patcher import import_finder
from kvtax.patcher.import_finder import MODULES
from kvtax.paths import REPOSITORY
from kvtax.proc.supervise import Supervised
from tests.proc.living import content, eventually, gone

DEADLINE_S = 120.0
FACTS = """
import json, os, resource, signal, sys, tempfile
streams = {fd: os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")}
changing = "TMPDIR", "VLLM_RPC_BASE_PATH"
print(json.dumps({
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "name": __name__,
    "spec": sys.modules["__main__"].__spec__.name,
    "env": {name: os.environ[name] for name in os.environ if name not in changing},
    "temporary": tempfile.gettempdir() == os.environ["TMPDIR"],
    "folder": os.getcwd(),
    "open": {fd: os.readlink(at) for fd, at in streams.items() if os.path.exists(at)},
    "own session": os.getsid(0) == os.getpgid(0) == os.getppid(),
    "signals": {number: str(signal.getsignal(number)) for number in range(1, 65)},
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "umask": os.umask(0o22),
    "cores": sorted(os.sched_getaffinity(0)),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "hash": hash("a"),
    "stdout": [sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.isatty()],
}, default=str))
raise SystemExit(7)
"""
# A parent with a port, a handler and an exit handler; its child looks for all three.
SPAWNS = """
import atexit, multiprocessing, random, signal, socket, time
import numpy

def child(port, pipe):
    atexit.register(print, "child ends", flush=True)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            time.sleep(0.02)
        except ConnectionRefusedError:
            break
    handler = signal.getsignal(signal.SIGTERM)
    pipe.send([handler == signal.SIG_DFL, random.random(), numpy.random.rand()])

if __name__ == "__main__":
    atexit.register(print, "parent ends", flush=True)
    signal.signal(signal.SIGTERM, print)
    listening = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    port = listening.getsockname()[1]
    process = context.Process(target=child, args=(port, theirs))
    process.start()
    listening.close()
    default, *numbers = ours.recv()
    process.join()
    print(default, process.exitcode, numbers[0] != random.random(), flush=True)
    print(numbers[1] != numpy.random.rand(), flush=True)
"""
SLEEPER = "import time; print('sleeps', flush=True); time.sleep(600)"
OWNER = """
import os, sys, time
from pathlib import Path
from kvtax.engine import preloaded
preloaded.IMPORTED = sys.argv[2]
command = [sys.executable, "-m", "sleeper"]
running = preloaded.Preloaded(command, dict(os.environ), Path(sys.argv[1]))
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """Fill a folder with modules; zygotes of the test import numpy alone."""
    monkeypatch.setattr(preloaded, "IMPORTED", "numpy")
    for name in ("FACTS", "SPAWNS", "SLEEPER"):
        (tmp_path / f"{name.lower()}.py").write_text(globals()[name])
    preloaded.end_all()
    yield tmp_path
    preloaded.end_all()


def start(
    folder: Path, module: str, kind: type[Supervised] = Preloaded, **env: str
) -> Supervised:
    command = [sys.executable, "-m", module, "an argument", "--option=1"]
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    return kind(command, os.environ | {"PYTHONPATH": path} | env, folder / "log")


def output(folder: Path, module: str, *arguments, **env: str) -> str:
    (folder / "log").unlink(missing_ok=True)
    with start(folder, module, *arguments, **env) as running:
        running.wait(DEADLINE_S)
    return (folder / "log").read_text()


def zygotes() -> list[int]:
    return list(preloaded.zygote_pids())


@pytest.mark.slow
def test_a_fork_looks_like_a_new_process(folder):
    env = {"PYTHONHASHSEED": "3", "VLLM_OF_THIS_ONE": "1"}
    cold = json.loads(output(folder, "facts", Supervised, **env))
    forked = json.loads(output(folder, "facts", Preloaded, **env))
    assert len(zygotes()) == 1
    assert forked == cold
    assert {"0", "1", "2"} == set(forked["open"])


@pytest.mark.slow
def test_status_output_and_stars_for_secrets_are_those_of_the_command(folder):
    command = [sys.executable, "-m", "facts"]
    env = os.environ | {"PYTHONPATH": str(folder)}
    running = Preloaded(command, env, folder / "log", secrets=["orig_argv"])
    assert running.wait(DEADLINE_S) == 7
    running.stop()
    text = (folder / "log").read_text()
    assert '"***": [' in text and "orig_argv" not in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Supervised, Preloaded])
def test_a_spawned_child_has_nothing_of_its_parents(kind, folder):
    lines = ["child ends", "True 0 True", "True", "parent ends"]
    assert output(folder, "spawns", kind).splitlines() == lines


@pytest.mark.slow
def test_one_zygote_forks_servers_of_several_threads_at_once(folder):
    with ThreadPoolExecutor(8) as threads:
        running = list(threads.map(lambda _: start(folder, "sleeper"), range(8)))
    processes = [pid for each in running for pid in each.pids()]
    assert len({each.supervisor_pid for each in running}) == len(zygotes()) * 8 == 8
    for each in running:
        each.stop()
    assert gone(processes)


@pytest.mark.slow
def test_other_variables_that_imports_may_read_have_another_zygote(folder):
    assert '"OMP_OTHER": "1"' in output(folder, "facts", OMP_OTHER="1")
    assert '"OMP_OTHER": "2"' in output(folder, "facts", OMP_OTHER="2")
    assert '"KVTAX_OTHER": "3"' in output(
        folder, "facts", KVTAX_OTHER="3", OMP_OTHER="2"
    )
    assert len(zygotes()) == 2
    before = zygotes()
    output(folder, "facts", OMP_OTHER="4")
    assert len(zygotes()) == 2 and not gone(zygotes())
    assert gone(set(before) - set(zygotes()))


@pytest.mark.slow
def test_commands_go_on_without_their_zygote_and_the_next_has_another(folder):
    with start(folder, "sleeper") as running:
        (zygote,) = zygotes()
        os.kill(zygote, signal.SIGKILL)
        eventually(lambda: gone([zygote]))
        assert json.loads(output(folder, "facts").splitlines()[-1])
        assert running.poll() is None and not gone(running.pids())
        assert zygote not in zygotes()


@pytest.mark.slow
def test_a_zygote_that_cannot_live_means_a_cold_start_that_says_why(folder):
    (folder / "sitecustomize.py").write_text(
        "import sys\nif 'kvtax.engine.zygote' in sys.orig_argv: sys.exit('no room')"
    )
    first, facts = output(folder, "facts").splitlines()
    assert first.startswith("kvtax: started cold: the zygote has ended: ")
    assert json.loads(facts)


LOOKS = """
import sys, sitecustomize
finders = [type(finder).__name__ for finder in sys.meta_path]
print(sitecustomize.__file__, sitecustomize.SEEN, finders, sys.path)
"""
THEIRS = """
with open(__file__ + ".runs", "a") as file:
    file.write("x")
SEEN = True
"""


@pytest.mark.slow
def test_a_sitecustomize_of_this_python_runs_once_and_an_overlay_s_on_top(folder):
    """As the almost empty one of Debian, which once made every server start cold."""
    overlay, theirs = folder / "overlay", folder / "sitecustomize.py"
    overlay.mkdir()
    shutil.copy(import_finder.__file__, overlay / "sitecustomize.py")
    (overlay / MODULES).write_text("")
    theirs.write_text(THEIRS)
    (folder / "looks.py").write_text(LOOKS)
    path = os.pathsep.join(map(str, [overlay, folder, REPOSITORY]))
    forked = output(folder, "looks", PYTHONPATH=path)
    assert "started cold" not in forked and "PatchedFinder" in forked
    assert (folder / "sitecustomize.py.runs").read_text() == "x"
    assert output(folder, "looks", Supervised, PYTHONPATH=path) == forked


@pytest.mark.slow
@pytest.mark.parametrize("early", ["vllm", "patched"])
def test_nothing_of_vllm_or_of_an_overlay_is_imported_before_the_fork(
    early, folder, monkeypatch
):
    overlay = folder / "overlay"
    overlay.mkdir()
    (overlay / MODULES).write_text("patched - source\n")
    (folder / f"{early}.py").write_text("")
    monkeypatch.setattr(preloaded, "IMPORTED", early)
    path = os.pathsep.join(map(str, [overlay, folder, REPOSITORY]))
    first, facts = output(folder, "facts", PYTHONPATH=path).splitlines()
    assert first.startswith(f"kvtax: started cold: {early} is imported")
    assert json.loads(facts)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("imported", ["json", "sleeper"])
def test_nothing_is_left_when_the_owner_dies_of(number, imported, folder):
    """Also while the zygote still imports."""
    log = folder / "log"
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, log, imported],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    if imported == "json":
        content(log)
    eventually(lambda: len(processes_with(folder)) > 1)
    below = processes_with(folder)
    os.kill(owner.pid, number)
    owner.wait()
    eventually(lambda: gone(below))


def processes_with(folder: Path) -> list[int]:
    """Find the processes that have the folder in their environment, but us."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


@pytest.mark.slow
def test_a_fork_of_the_owner_has_a_zygote_of_its_own(folder):
    output(folder, "facts")
    before = zygotes()
    if (pid := os.fork()) == 0:
        time.sleep(0)
        os._exit(1 if preloaded.zygotes else 0)
    assert os.waitpid(pid, 0)[1] == 0
    assert json.loads(output(folder, "facts"))
    assert zygotes() == before
