# SPDX-License-Identifier: Apache-2.0
"""A host's work that takes no time: each task gets a result of its own bytes."""

from __future__ import annotations

import sys
from pathlib import Path

from lab.hosts.asked import Asked
from lab.serving.supervise import exit_on_signals


def main() -> None:
    folder = Path(sys.argv[1])
    exit_on_signals()
    asked = Asked(folder)
    while asked.open:
        for number, content in asked.come(1.0):
            made = folder / f"made{number}"
            made.mkdir()
            (made / "result").write_bytes(content)
            asked.done(number, made)


if __name__ == "__main__":
    main()
