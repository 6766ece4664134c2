# SPDX-License-Identifier: Apache-2.0
"""A host's work for tests: squares of numbers, some of which take their time.

    python -m tests.hosts.squares FOLDER

The task "7 0.5" is answered with 49 after half a second, and "die" by the end of the
process.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from kvtax.hosts.worker import Tasks
from kvtax.signals import exit_on_signals


def main() -> None:
    folder = Path(sys.argv[1])
    exit_on_signals()
    tasks = Tasks(folder)
    due: dict[int, tuple[float, int]] = {}
    while tasks.open or due:
        for number, content in tasks.come(0.005):
            if content == b"die":
                print("these are my last words", flush=True)
                os._exit(1)
            value, seconds = content.split()
            due[number] = time.monotonic() + float(seconds), int(value) ** 2
        now_s = time.monotonic()
        for number in [one for one, (at_s, _) in due.items() if at_s <= now_s]:
            made = folder / f"made{number}"
            made.mkdir()
            (made / "square").write_text(str(due.pop(number)[1]))
            tasks.done(number, made)


if __name__ == "__main__":
    main()
