# SPDX-License-Identifier: Apache-2.0
"""Check whether Mooncake reports a write over TCP before the bytes have arrived.

Exit codes: 0 no, 1 yes, 3 the check could not be done.
"""

from __future__ import annotations

import argparse

from benchmarks.results import NotMeasured
from kvtax.engine.transfer_check import MAX_ROUNDS, ROUNDS, NoVerdict, check, verdict


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench transfer_check`."""
    parser.add_argument(
        "--rounds", type=_rounds, default=ROUNDS, help=f"writes (default: {ROUNDS})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict and return 1 if writes were reported too early."""
    try:
        outcome = check(arguments.rounds)
    except NoVerdict as error:
        raise NotMeasured(f"transfer_check: no verdict: {error}") from error
    print(f"transfer_check: {verdict(outcome)}")
    return 1 if outcome.incomplete_ms else 0


def _rounds(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= MAX_ROUNDS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not one of 1 to {MAX_ROUNDS}")
