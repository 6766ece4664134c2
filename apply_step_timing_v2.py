#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Apply, revert and inspect source patches of an installed package: `kvtax patch`.

Needs nothing but Python >= 3.11. Without --patch: the set `timing`, which records steps
and requests; --patch all adds the fixes.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent
sys.path.insert(0, str(REPOSITORY))

# This file must parse on the Pythons that it refuses.
if sys.version_info < (3, 11):  # noqa: UP036
    print(
        "refused: apply_step_timing_v2.py needs Python >= 3.11, and this is "
        f"{sys.version.split()[0]}; use a newer one and name the tree with --target",
        file=sys.stderr,
    )
    sys.exit(2)

from kvtax.patcher.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(__doc__, REPOSITORY))
