# SPDX-License-Identifier: Apache-2.0
"""Runs storms one after the other: `storm_script.py RESULT [[ledger, depth, ..], ..]`.

Started by test_storm.py on a tree with block_pool_delta_listener.
"""

import json
import logging
import sys
from pathlib import Path

from storm import LEDGERS, Storm


def main() -> None:
    logging.disable(logging.ERROR)  # resets
    # Threads take turns all the time, also within a lookup.
    sys.setswitchinterval(1e-5)
    found = [
        Storm(LEDGERS[ledger], depth, seed).run(duration_s, enough_wrong)
        for seed, (ledger, depth, duration_s, enough_wrong) in enumerate(
            json.loads(sys.argv[2])
        )
    ]
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
