#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Apply, revert and inspect the source patches of an installed package.

Without --patch: the set step_timing_v2 of patches/sets.toml, that is the patches
step_timing_v1, step_timing_v2 and request_timing, which record steps and requests.
``--patch step_timing_v2`` is that one patch alone.
Runs with any Python >= 3.11; see --help.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent
sys.path.insert(0, str(REPOSITORY))

from blockpatch.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(None, REPOSITORY / "patches", default_set="step_timing_v2"))
