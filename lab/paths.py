# SPDX-License-Identifier: Apache-2.0
"""The folders of this repository that code needs to find."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "configs"
PATCHES = REPOSITORY / "patches"
