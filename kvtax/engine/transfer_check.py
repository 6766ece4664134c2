# SPDX-License-Identifier: Apache-2.0
"""Check that Mooncake reports a write only after the bytes have arrived.

Over TCP some versions return from `batch_transfer_sync_write` before the peer has the
bytes: the prefill instance then reports a request sent whose KV is still under way.
Two bare engines on the loopback interface (kvtax.engine.transfer_pair) show it.

How sure it is: of the writes by 0.3.10, 0.3.10.post2 and 0.3.11.post1, 96 % were
incomplete on return (747 of 780; 39 fresh pairs of engines on two cores, on one, and
beside two busy processes; 16 of 20 in the worst pair), and none of 520 by 0.3.12 and
0.3.13.post1. FEW_ROUNDS at the worst pair's rate miss a lie once in 10^14 times.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from pathlib import Path

import msgspec

from kvtax.engine.installation import Installation, installation
from kvtax.engine.transfer_pair import ARRIVAL_LIMIT_MS, WRITE_BYTES, TransferOutcome
from kvtax.proc.supervise import Supervised

# Writes that a preflight looks at.
FEW_ROUNDS = 20
FIRST_HONEST_VERSION = "0.3.12"
# About ten times what it takes on two busy cores.
START_LIMIT_S, ROUND_LIMIT_S = 20.0, 0.5


class NoVerdict(Exception):
    """The check could not be done; the message says why."""


def check(rounds: int, installed: Installation | None = None) -> TransferOutcome:
    """Let Mooncake, by default ours, write `rounds` times and see how late it is.

    Raises NoVerdict if an engine fails or does not get done in time.
    """
    limit_s = START_LIMIT_S + ROUND_LIMIT_S * rounds
    installed = installed or installation()
    command = installed.command("-m", "kvtax.engine.transfer_pair", str(rounds))
    # A file without a name: nothing of it is left if we are killed.
    with tempfile.TemporaryFile() as output:
        log = Path(f"/proc/{os.getpid()}/fd/{output.fileno()}")
        with Supervised(command, dict(os.environ), log) as pair:
            try:
                status = pair.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise NoVerdict(f"not done after {limit_s:.0f} s") from None
        lines = output.read().decode(errors="replace").splitlines()
    for line in lines:
        # The engines write there too.
        if line.startswith("{"):
            return msgspec.json.decode(line, type=TransferOutcome)
    failure = f"the engines ended with status {status}"
    raise NoVerdict("\n".join([failure, *lines[-8:]]))


def verdict(outcome: TransferOutcome) -> str:
    """Explain the outcome, and the remedy if it is bad."""
    what = f"{outcome.package} {outcome.version}"
    rounds, late_ms = len(outcome.late_ms), outcome.incomplete_ms
    size = f"{WRITE_BYTES // 2**20} MiB"
    if not late_ms:
        return (
            f"{what} is honest over TCP: {rounds} of {rounds} writes of {size} were "
            "complete when they returned"
        )
    worst_ms = max(late_ms)
    worst = (
        f"{worst_ms:.1f}"
        if worst_ms < ARRIVAL_LIMIT_MS
        else f"over {ARRIVAL_LIMIT_MS:.0f}"
    )
    return (
        f"{what} LIES over TCP: {len(late_ms)} of {rounds} writes of {size} were "
        "incomplete when batch_transfer_sync_write returned, the last byte "
        f"{statistics.median(late_ms):.1f} ms late (median) and {worst} ms at worst. "
        "A decode instance may compute with KV that is not there and give wrong tokens "
        f"without an error. Install {outcome.package}>={FIRST_HONEST_VERSION}"
    )
