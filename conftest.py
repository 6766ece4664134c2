# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvtax.proc.loopback import without_proxy

# Many container images forbid Python to keep bytecode. Then each process that a test
# starts would compile its imports anew: seconds where it imports torch.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The proxy of a host knows none of the servers that tests start.
os.environ.update(without_proxy(os.environ))
# Our matrices are small. On a busy machine numpy's threads spend several times the
# time of a product waiting for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Each patch that a test applies waits for the disk, and for all that other tests write
# to it. In memory nothing waits, and nothing is kept: to look at a test's files, set
# TMPDIR.
MEMORY, ROOM_BYTES = "/dev/shm", 12 << 30


def is_roomy() -> bool:
    """Return whether MEMORY has room for the tests, and runs programs."""
    try:
        place, memory = os.statvfs(MEMORY), Path("/proc/meminfo").read_text()
    except OSError:
        return False
    available_bytes = 1024 * int(re.search(r"MemAvailable: +(\d+)", memory)[1])
    free_bytes = min(available_bytes, place.f_bavail * place.f_frsize)
    return free_bytes > ROOM_BYTES and not place.f_flag & os.ST_NOEXEC


# A shell starts a command in the background with SIGINT ignored. What a test starts
# would inherit that, and a test that interrupts it would wait to its timeout.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A stall of the machine is not a fault of what is tested. `make test-all` draws more.
settings.register_profile(
    "few", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30
)
settings.register_profile("many", settings.get_profile("few"), max_examples=200)
settings.load_profile("few")

# Folders whose tests share servers: one worker of pytest-xdist runs all of each.
TOGETHER = ("tests/patched/", "tests/e2e/")
# Thousands of tests of others, through which a collection would look.
OTHERS = ("third_party", ".venv", ".releases")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have this run's files in a folder of MEMORY, and remove it at the end."""
    # A worker of pytest-xdist has the folder of its parent.
    if "TMPDIR" in os.environ or not is_roomy():
        return
    folder = tempfile.mkdtemp(prefix="kvt-", dir=MEMORY)
    # Some tests start servers of another user.
    os.chmod(folder, 0o755)
    lock(folder)
    for other in Path(MEMORY).glob("kvt-*"):
        # A run that was killed holds its folder no longer.
        with suppress(OSError):
            os.close(lock(other))
            shutil.rmtree(other, ignore_errors=True)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.option.basetemp = config.option.basetemp or f"{folder}/pytest"


def lock(folder: str | Path) -> int:
    """Hold a folder to the end of this process. Raises OSError if another holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file, and no folder's conftest, that `-m "not MARK ..."` leaves out."""
    if collection_path.name in OTHERS:
        return True
    selection = config.option.markexpr
    if not re.fullmatch(r"not \w+( and not \w+)*", selection):
        return None
    left_out = set(re.findall(r"not (\w+)", selection))
    files = [collection_path]
    if collection_path.is_dir():
        files = list(collection_path.rglob("test_*.py"))
    files = [file for file in files if file.suffix == ".py"]
    return True if files and all(marks(file) & left_out for file in files) else None


def marks(file: Path) -> set[str]:
    """Return the marks of all tests of a file."""
    marked = re.search(r"^pytestmark = (.*)$", file.read_text(), re.M)
    return set(re.findall(r"pytest\.mark\.(\w+)", marked[1])) if marked else set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Begin with what takes longest, or one worker would end with it alone."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(TOGETHER))


def pytest_xdist_make_scheduler(config, log):
    """Give each test file to one worker, and each folder of TOGETHER, too."""
    from xdist.scheduler import LoadFileScheduling

    class LoadFolderScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folders = (folder for folder in TOGETHER if nodeid.startswith(folder))
            return next(folders, super()._split_scope(nodeid))

    return LoadFolderScheduling(config, log)


@pytest.fixture(scope="session")
def installed_vllm():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")


@pytest.fixture
def signals():
    """Give the signals back that a command in the test's process takes over."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
