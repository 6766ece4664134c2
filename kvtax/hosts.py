# SPDX-License-Identifier: Apache-2.0
"""Tasks on the nodes of a Ray cluster: functions that run here run there, too.

A task is a function that fills a folder. Ray ships the files of this checkout that git
tracks, chooses the node, and does the task again elsewhere if the node is lost. On the
node the function runs in a process of its own, below a supervisor; its files are the
task's result.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from kvtax.engine.installation import Installation, installation
from kvtax.engine.server import tail
from kvtax.paths import REPOSITORY
from kvtax.proc.foreground import Foreground, run_in_foreground
from kvtax.proc.machine_lock import machine_lock
from kvtax.proc.supervise import begin_child
from kvtax.signals import SIGNALS, exit_on_signals

RETRIES = 3
# The resource of nodes that measure, one task at a time: docs/operate.md.
MEASURES = "kvtax"
# Ray's workers have one thread in OpenMP, and no GPU unless a task asks for one.
NOT_OURS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
# Folders beside .venv of a host's own checkout.
ENVIRONMENTS = (".releases", ".uv")
LOOPBACK = ("127.", "::1")
CONNECT_S = 10.0
LOOK_EVERY_S = 0.2
WATCH_EVERY_S = 0.05
# Seconds without any node for the tasks until the command gives up.
NO_NODE_S = 60.0
# Servers get 15 s to end by themselves, and their supervisors a few more.
CLOSE_S = 40.0
TASK, DONE, RESULT = "task", "done", "result"


class HostsError(Exception):
    """The hosts cannot do the work; the message says which task, where and why."""

    exit_code = 3


class TaskFailed(Exception):
    """A task's process ended with an error; raised on its node."""


@dataclass(frozen=True)
class Cluster:
    """Address of a Ray cluster; an `insecure` one may lack a token."""

    address: str
    insecure: bool = False


@dataclass(frozen=True)
class Task:
    """`function(folder, *arguments)` fills the folder; both are pickled."""

    name: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class FinishedTask:
    """A task's result: the contents of its files, by path in the folder."""

    name: str
    host: str
    files: dict[str, bytes]

    def put(self, root: Path, folders: Iterable[str]) -> None:
        """Put `folders` of the result below `root`, each whole, for an earlier one.

        Raises HostsError if the host names a file outside of its result.
        """
        for name in self.files:
            place = PurePosixPath(name)
            if place.is_absolute() or ".." in place.parts or not place.name:
                raise HostsError(
                    f"{self.name}: {self.host} sent a file for {name!r}, which is "
                    "outside of the task's result: nothing of it was written"
                )
        with tempfile.TemporaryDirectory(dir=root) as made:
            for name, content in self.files.items():
                path = Path(made, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            for folder in folders:
                (root / folder).parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(root / folder, ignore_errors=True)
                Path(made, folder).rename(root / folder)


def finished_tasks(
    cluster: Cluster, tasks: Sequence[Task], measures: bool
) -> Iterator[FinishedTask]:
    """Yield all tasks, as they are done on the cluster.

    A task that `measures` has a node of the resource MEASURES for itself, another one a
    core. Leaving the iterator ends all tasks. Raises HostsError.
    """
    import ray

    needs: dict[str, Any] = {"num_cpus": 1}
    if measures:
        needs = {"num_cpus": 0, "resources": {MEASURES: 1}}
    run = ray.remote(**needs, max_retries=RETRIES, scheduling_strategy="SPREAD")(_run)
    with _tracked_files() as shipped, connected(cluster, shipped):
        nodes = _Nodes(MEASURES if measures else "CPU")
        versions = installation().versions
        waiting = {}
        for task in tasks:
            content = (task.function, task.arguments, versions, measures)
            waiting[run.remote(pickle.dumps(content))] = task
        try:
            while waiting:
                nodes.look()
                # A signal that comes during ray.wait would lose its exit code.
                ended, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
                for ref in ended:
                    yield _finished(waiting.pop(ref).name, ref)
                time.sleep(LOOK_EVERY_S)
        finally:
            for ref in waiting:
                ray.cancel(ref)
            if waiting:
                ray.wait(list(waiting), num_returns=len(waiting), timeout=CLOSE_S)


def _finished(name: str, ref: Any) -> FinishedTask:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        host, files = ray.get(ref)
    except RayTaskError as error:
        raise HostsError(f"{name}: {error.cause}") from None
    except RayError as error:
        raise HostsError(
            f"{name} was lost with its host, again and again: {error}"
        ) from None
    return FinishedTask(name, host, files)


class _Nodes:
    """The nodes with a resource, which come and go."""

    def __init__(self, resource: str) -> None:
        self._resource = resource
        self._alive: set[str] = set()
        self._seen_s = time.monotonic()

    def look(self) -> None:
        """Report lost nodes. Raises HostsError if there has been none for a while."""
        import ray

        alive = {
            node["NodeManagerAddress"]
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get(self._resource)
        }
        for host in self._alive - alive:
            print(
                f"lost {host}: its tasks are done again elsewhere",
                file=sys.stderr,
                flush=True,
            )
        self._alive = alive
        now_s = time.monotonic()
        if alive:
            self._seen_s = now_s
        elif now_s - self._seen_s > NO_NODE_S:
            raise HostsError(
                f"no node of the cluster has the resource {self._resource}: "
                f"""`ray start --resources='{{"{self._resource}": 1}}'` on each """
                "host (docs/operate.md)"
            )


@contextmanager
def _tracked_files() -> Iterator[Path]:
    """Copy the files that git tracks into a folder. Raises HostsError without git."""
    listing = ["git", "ls-files", "-z"]
    listed = subprocess.run(listing, cwd=REPOSITORY, capture_output=True)
    if listed.returncode != 0:
        raise HostsError(
            "--ray ships the files that git tracks, and git lists none: "
            f"{listed.stderr.decode(errors='replace').strip()}; run from a clone"
        )
    with tempfile.TemporaryDirectory(prefix="kvtax-ship-") as folder:
        for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
            file, copy = REPOSITORY / name, Path(folder, name)
            # A file may be deleted and still tracked, and a link may lead elsewhere.
            if file.is_file() and not file.is_symlink():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, copy)
        yield Path(folder)


@contextmanager
def connected(cluster: Cluster, working_dir: Path) -> Iterator[None]:
    """Connect to the cluster, whose tasks run in a copy of `working_dir`.

    Raises HostsError if anybody may use the cluster who reaches it.
    """
    import ray
    from ray.exceptions import AuthenticationError, RayError

    address = cluster.address
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        _require_listener(address)
        ray.init(
            address=address,
            runtime_env={"working_dir": str(working_dir)},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except AuthenticationError:
        raise HostsError(
            f"the Ray cluster at {address} refused the token of this command, or its "
            "lack: set RAY_AUTH_MODE=token, and have the cluster's token in "
            "~/.ray/auth_token or RAY_AUTH_TOKEN (docs/operate.md)"
        ) from None
    except (RayError, OSError, ValueError, RuntimeError) as error:
        raise HostsError(
            f"no Ray cluster at {address}: {error}\n`ray start --head` begins one, and "
            "`ray status` says what it has"
        ) from None
    try:
        # At SIGTERM Ray would end this process without any cleaning up.
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if not cluster.insecure:
            _refuse_open(address)
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise OSError or ValueError for a wrong address; Ray would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("an address is HOST:PORT, or auto")
    socket.create_connection((host, int(port)), CONNECT_S).close()


def _refuse_open(address: str) -> None:
    """Raise HostsError for a cluster that others can reach without a token."""
    import ray

    hosts = [node["NodeManagerAddress"] for node in ray.nodes()]
    beyond = not all(host.startswith(LOOPBACK) for host in hosts)
    if beyond and os.environ.get("RAY_AUTH_MODE") != "token":
        raise HostsError(
            f"the Ray cluster at {address} asks for no token: whoever reaches it can "
            "run anything on its hosts. Start Ray with RAY_AUTH_MODE=token on each "
            "host (docs/operate.md), or accept that with --insecure"
        )


def _run(task: bytes) -> tuple[str, dict[str, bytes]]:
    """Run the task in a process; return this host's name and the task's files.

    Runs in a worker of Ray. Raises TaskFailed with the host and the log's end.
    """
    import ray

    host = ray.util.get_node_ip_address()
    _link_environments()
    # The process removes the folder as well, in case this worker is killed.
    with tempfile.TemporaryDirectory(
        prefix="kvtax-host-", ignore_cleanup_errors=True
    ) as folder:
        return host, _files_of(task, Path(folder), host)


def _files_of(task: bytes, folder: Path, host: str) -> dict[str, bytes]:
    """Run the task in a process; return the files that it made."""
    result = folder / RESULT
    result.mkdir()
    (folder / TASK).write_bytes(task)
    env = {name: of for name, of in os.environ.items() if name not in NOT_OURS}
    path = [REPOSITORY, REPOSITORY / "fleet" / "src"]
    env |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "kvtax.hosts", str(folder)]
    # The folder goes with the process, but the log's end is wanted then.
    with (
        os.fdopen(os.memfd_create("log"), "wb") as log,
        _process(command, env, log) as process,
    ):
        while not (folder / DONE).exists():
            if process.poll() is not None:
                end = tail(Path(f"/proc/self/fd/{log.fileno()}"))
                raise TaskFailed(f"on {host}: {end}")
            time.sleep(WATCH_EVERY_S)
        return {
            str(path.relative_to(result)): path.read_bytes()
            for path in result.rglob("*")
            if path.is_file()
        }


@contextmanager
def _process(
    command: list[str], env: dict[str, str], log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that ends with the context, or with this process."""
    process = subprocess.Popen(
        command,
        env=env,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        preexec_fn=begin_child,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _link_environments() -> None:
    """Have the shipped checkout use what the host's own one has installed."""
    for name in ENVIRONMENTS:
        own = Path(sys.prefix).parent / name
        own.mkdir(exist_ok=True)
        with suppress(FileExistsError):
            (REPOSITORY / name).symlink_to(own)


def main() -> int:
    """Run the task of the folder below a supervisor; remove the folder.

    Ray kills the children of its workers: this process, not the supervisor.
    """
    folder = Path(sys.argv[1])
    script = "from kvtax.hosts import run_task; run_task()"
    command = [sys.executable, "-c", script, str(folder)]
    return run_in_foreground(Foreground(command, dict(os.environ), folder))


def run_task() -> None:
    """Run the task of the folder; wait until its files are fetched."""
    exit_on_signals()
    folder = Path(sys.argv[1])
    content = pickle.loads((folder / TASK).read_bytes())
    function, arguments, versions, measures = content
    try:
        require_same(installation(), versions)
        if measures:
            _require_no_niceness()
        with machine_lock() if measures else nullcontext():
            function(folder / RESULT, *arguments)
            (folder / DONE).touch()
            signal.pause()
    except Exception as error:
        if not hasattr(error, "exit_code"):
            traceback.print_exc()
            sys.exit(1)
        sys.exit(str(error))


def require_same(there: Installation, versions: dict[str, str]) -> None:
    """Raise HostsError if packages of a host are not those of the command's host."""
    for name in sorted(there.versions.keys() | versions.keys()):
        if there.versions.get(name) != versions.get(name):
            raise HostsError(
                f"{name} is {there.versions.get(name)} there, and {versions.get(name)} "
                "where the command runs: make setup, from one lock"
            )


def _require_no_niceness() -> None:
    if (niceness := os.nice(0)) > 0:
        raise HostsError(
            f"Ray's workers run at niceness {niceness} there, and wait for all other "
            "processes: set RAY_worker_niceness=0 for `ray start`"
        )


if __name__ == "__main__":
    sys.exit(main())
