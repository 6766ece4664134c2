# SPDX-License-Identifier: Apache-2.0
"""Fit a step of an H20 to half of the lengths that the study's authors measured.

Prints the fit beside all of them, those that were left out among them. A prompt's time
is that of its chunks and of a path outside of the steps, which a request takes once.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import msgspec
import numpy as np
from kvtax_fleet.launch.instance_settings import read_instance_settings
from kvtax_fleet.paths import CONFIGS
from kvtax_fleet.records.host_times import HostTimes
from kvtax_fleet.simulate.cost import request_ns

from kvtax.engine.null_model import Forward
from kvtax.engine.vllm_plugin.kvtax_null_model.forward import SimulatedForward
from kvtax.records.files import read_document
from kvtax.report.markdown import table
from studies.harness import main
from studies.reference_study.reference import figures

PROFILE = read_instance_settings(CONFIGS / "profiles" / "h20-measured.toml")
HOST = read_document(CONFIGS / "hosts" / "h20.json", HostTimes)
PREFILLS = "forward: a prompt with nothing cached"
DECODES = "forward: a decoded token"
FITTED_TOKENS = (1_024, 4_096, 16_384, 65_536)


class Fit(NamedTuple):
    """Times in µs: of a request's path, of a step, per token, per token attended to."""

    path_us: float
    forward_us: float
    us_per_token: float
    us_per_context_token: float


class Row(NamedTuple):
    """A measured time and the profile's, in ms."""

    what: str
    measured_ms: float
    here_ms: float
    fitted: bool

    @property
    def off(self) -> float:
        """The profile's error, as a share of the measured."""
        return self.here_ms / self.measured_ms - 1


def fit() -> Fit:
    """Fit to FITTED_TOKENS and decoded tokens: least squares of relative errors."""
    terms, values_us = [], []
    measured = figures(PREFILLS)
    for tokens in FITTED_TOKENS:
        begins = range(0, tokens, PROFILE.max_num_batched_tokens)
        terms.append([1, len(begins), tokens, tokens * (tokens - 1) / 2])
        values_us.append(1e3 * measured[str(tokens)] - _kv_us(sum(begins)))
    for requests, ms in figures(DECODES).items():
        terms.append([0, 1, int(requests), 0])
        values_us.append(1e3 * ms)
    relative = np.array(terms) / np.array(values_us)[:, None]
    solved = np.linalg.lstsq(relative, np.ones(len(terms)), rcond=None)[0]
    return Fit(*(float(f"{value:.3g}") for value in solved))


def _kv_us(tokens: int) -> float:
    assert PROFILE.forward is not None
    return PROFILE.forward.us_per_kv_token * tokens


def rows() -> list[Row]:
    """Set each measured time beside the profile's."""
    assert PROFILE.forward is not None
    prefills = [
        Row(
            f"prompt of {int(tokens):,} tokens",
            ms,
            prefill_ms(PROFILE.forward, int(tokens)),
            int(tokens) in FITTED_TOKENS,
        )
        for tokens, ms in figures(PREFILLS).items()
    ]
    device = SimulatedForward(**msgspec.structs.asdict(PROFILE.forward))
    decodes = [
        Row(
            f"decoded token, {requests} at once",
            ms,
            device.duration_us(int(requests), 0) / 1e3,
            True,
        )
        for requests, ms in figures(DECODES).items()
    ]
    return prefills + decodes


def prefill_ms(forward: Forward, tokens: int) -> float:
    """Compute the time to the first token of a prompt, alone and not cached."""
    device = SimulatedForward(**msgspec.structs.asdict(forward))
    us = request_ns(HOST.requests.to_engine, tokens) / 1e3
    for begin in range(0, tokens, PROFILE.max_num_batched_tokens):
        count = min(PROFILE.max_num_batched_tokens, tokens - begin)
        us += device.duration_us(
            count, count * begin + count * (count - 1) / 2, kv_tokens=begin
        )
    return us / 1e3


def forward_table(beside: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of a table of the rows."""
    heads = ["forward", "measured, ms", "profile, ms", "off by, %", "length"]
    return heads, [
        [
            row.what,
            f"{row.measured_ms:g}",
            f"{row.here_ms:.1f}",
            f"{100 * row.off:+.1f}",
            "fitted" if row.fitted else "held out",
        ]
        for row in beside
    ]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add no option: the fit has none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the fit, and the profile beside all that was measured."""
    print("\n".join(f"{name} = {value:g}" for name, value in fit()._asdict().items()))
    print(table(*forward_table(rows())))
    return 0


if __name__ == "__main__":
    main("reference_study.forward", __doc__, configure, run)
