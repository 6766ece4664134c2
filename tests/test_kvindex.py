# SPDX-License-Identifier: Apache-2.0
"""The prefix index is in Go and has its own tests; those of its core run here too."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

KVINDEX = Path(__file__).parents[1] / "kvindex"


# The other tests start no goroutine, so that the race detector finds nothing in them.
CONCURRENT = re.findall(
    r"^func (Test\w+)", (KVINDEX / "concurrency_test.go").read_text(), re.M
)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("go"), reason="needs Go 1.25")
@pytest.mark.skipif(not shutil.which("gcc"), reason="the race detector needs gcc")
@pytest.mark.parametrize(
    "options", [[], ["-race", "-run", f"^({'|'.join(CONCURRENT)})$"]]
)
def test_core_passes_its_tests_and_the_concurrent_ones_under_the_race_detector(options):
    command = ["go", "test", *options, "./..."]
    result = subprocess.run(command, cwd=KVINDEX, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
