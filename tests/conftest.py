# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Many container images forbid Python to keep bytecode. Then each process that a test
# starts would compile its imports anew: seconds where it imports torch.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Our matrices are small. On a busy machine numpy's threads spend several times the
# time of a product waiting for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A stall of the machine is not a fault of what is tested. `make test-all` draws more.
settings.register_profile(
    "few", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30
)
settings.register_profile("many", settings.get_profile("few"), max_examples=200)
settings.load_profile("few")

# Folders whose tests share servers: one worker of pytest-xdist runs all of each.
TOGETHER = ("tests/patched/", "tests/e2e/")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file that `-m "not MARK and ..."` leaves out as a whole."""
    selection = config.option.markexpr
    if collection_path.suffix != ".py" or not re.fullmatch(
        r"not \w+( and not \w+)*", selection
    ):
        return None
    marked = re.findall(r"^pytestmark = (.*)$", collection_path.read_text(), re.M)
    marks = set(re.findall(r"pytest\.mark\.(\w+)", marked[0])) if marked else set()
    return True if marks & set(re.findall(r"not (\w+)", selection)) else None


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
