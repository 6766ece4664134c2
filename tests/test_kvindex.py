# SPDX-License-Identifier: Apache-2.0
"""The prefix index is in Go and has its own tests; those of its core run here too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvindex.cmd.kvindexd.events import messages

KVINDEX = Path(__file__).parents[1] / "kvindex"


# Under the race detector it takes a minute, and bytes say nothing there.
OF_MEMORY = "^TestABlockTakesAtMost64Bytes$"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("go"), reason="needs Go 1.25")
@pytest.mark.skipif(not shutil.which("gcc"), reason="the race detector needs gcc")
@pytest.mark.parametrize("options", [[], ["-race", "-skip", OF_MEMORY]])
def test_core_passes_its_own_tests_and_all_but_one_under_the_race_detector(options):
    command = ["go", "test", *options, "./..."]
    result = subprocess.run(command, cwd=KVINDEX, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_committed_messages_are_those_that_the_releases_publish():
    files = messages.releases().items()
    if missing := [release for release, file in files if not file.exists()]:
        pytest.skip(f"no sources of {', '.join(missing)}: run make vllm-releases")
    assert messages.document() == messages.FILE.read_text()
