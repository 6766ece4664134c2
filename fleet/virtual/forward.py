# SPDX-License-Identifier: Apache-2.0
"""Fit a profile's `forward` to the step records of a server: your GPU in virtual time.

    python -m fleet.virtual.forward RECORDS_DIR

Prints the table for a file of configs/fleet/. The server needs the patches
`step_timing_v1` and `request_timing`, and no connector. Exit status 0; 2 with a message
if the records cannot be read or say too little.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from fleet.virtual.forward_steps import Forwards, read_forwards
from lab.records import RecordsError
from lab.stats.estimate import Floats

NAMES = ("forward_us", "us_per_token", "us_per_context_token")
# Of the steps in order of time, one stretch after the other is predicted from the rest.
STRETCHES = 10
FEWEST_STEPS = 200
ROUNDS = 30


def fit(forwards: Forwards) -> Floats:
    """[3], by NAMES: the sum of the relative errors is least; none is below 0."""
    return _fitted(_terms(forwards), forwards.took_us)


def held_out_errors(forwards: Forwards) -> tuple[Floats, float]:
    """Of each step, predicted from other stretches of time: its relative error.

    And the relative error of all predictions together.
    """
    terms, took_us = _terms(forwards), forwards.took_us
    predicted_us = np.empty_like(took_us)
    for held in np.array_split(np.arange(len(took_us)), STRETCHES):
        kept = np.delete(np.arange(len(took_us)), held)
        predicted_us[held] = terms[held] @ _fitted(terms[kept], took_us[kept])
    together = predicted_us.sum() / took_us.sum() - 1
    return predicted_us / took_us - 1, float(together)


def _terms(forwards: Forwards) -> Floats:
    """[steps, 3], by NAMES."""
    ones = np.ones_like(forwards.tokens)
    return np.stack([ones, forwards.tokens, forwards.attended_tokens], axis=1)


def _fitted(terms: Floats, took_us: Floats) -> Floats:
    """Least absolute relative error, by least squares with weights, again and again.

    A step that the host held up is far off, and must not count by its square.
    """
    found = np.zeros(terms.shape[1])
    used = np.ones(terms.shape[1], bool)
    while True:
        weights = 1 / took_us
        for _ in range(ROUNDS):
            # Without it, terms differ by ten orders of magnitude.
            scale = np.abs(terms[:, used] * weights[:, None]).sum(axis=0)
            scaled = terms[:, used] * weights[:, None] / scale
            solved = np.linalg.lstsq(scaled, took_us * weights, rcond=None)[0] / scale
            off = np.abs(terms[:, used] @ solved / took_us - 1)
            weights = 1 / (took_us * np.sqrt(np.maximum(off, 1e-4)))
        if (solved >= 0).all():
            found[used] = solved
            return found
        used[np.flatnonzero(used)[solved.argmin()]] = False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleet.virtual.forward", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("records", type=Path, metavar="RECORDS_DIR")
    options = parser.parse_args(argv)
    try:
        forwards = read_forwards(options.records)
        if (found := len(forwards.took_us)) < FEWEST_STEPS:
            raise RecordsError(
                f"{options.records}: what they computed is known of {found} of "
                f"{forwards.of_steps} steps; {FEWEST_STEPS} are needed"
            )
    except RecordsError as error:
        print(f"fleet.virtual.forward: {error}", file=sys.stderr)
        return 2
    print(report(forwards))
    return 0


def report(forwards: Forwards) -> str:
    """TOML, and as its comment how well it predicts what it was not fitted to."""
    errors, together = held_out_errors(forwards)
    middle, most = np.quantile(np.abs(errors), [0.5, 0.9])
    share = len(errors) / forwards.of_steps
    lines = [
        f"# Fitted to {len(errors):,} steps, {share:.1%} of all. Steps held out are",
        f"# predicted within {middle:.1%} (median) and {most:.1%} (p90), all of them "
        f"together to {together:+.1%}.",
        "[forward]",
    ]
    values = zip(NAMES, fit(forwards), strict=True)
    return "\n".join(lines + [f"{name} = {value:.4g}" for name, value in values])


if __name__ == "__main__":
    sys.exit(main())
