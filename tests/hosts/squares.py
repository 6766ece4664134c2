# SPDX-License-Identifier: Apache-2.0
"""The task of the tests: a number is squared."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

# Of a task that fails, and of one that ends its process at once.
FAILS, ENDS = 666, 667


def square(folder: Path, number: int, seconds: float) -> None:
    """Write the square, and when it was made; a child sleeps meanwhile."""
    began_ns = time.time_ns()
    if number == FAILS:
        raise ValueError("666 has no square")
    if number == ENDS:
        sys.exit("these are my last words")
    subprocess.run(["sleep", str(seconds)], check=True)
    (folder / "deep").mkdir()
    (folder / "deep" / "square").write_text(str(number**2))
    (folder / "when").write_text(json.dumps([began_ns, time.time_ns()]))
