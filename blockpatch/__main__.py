# SPDX-License-Identifier: Apache-2.0
"""``python -m blockpatch``: the command line without a default set of patches."""

import sys
from pathlib import Path

from .cli import main

sys.exit(main(None, Path(__file__).resolve().parents[1] / "patches"))
