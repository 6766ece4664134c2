# SPDX-License-Identifier: Apache-2.0
"""Put the commit of the checkout into the wheel, and into the sdist for its wheel."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMIT = "COMMIT"


class CommitHook(BuildHookInterface[Any]):
    """Build hook that writes the file COMMIT."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file, unless the project is installed in place."""
        if version == "editable" or not (commit := _commit(Path(self.root))):
            return
        folder = Path(tempfile.mkdtemp(prefix="kvtax-build-"))
        (folder / COMMIT).write_text(f"{commit}\n")
        place = COMMIT if self.target_name == "sdist" else f"kvtax/data/{COMMIT}"
        build_data["force_include"][str(folder / COMMIT)] = place
        self._folder = folder

    def finalize(self, *_: object) -> None:
        """Remove the file that was added."""
        if folder := getattr(self, "_folder", None):
            (folder / COMMIT).unlink()
            folder.rmdir()


def _commit(root: Path) -> str:
    if (root / COMMIT).is_file():
        return (root / COMMIT).read_text().strip()
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
