# SPDX-License-Identifier: Apache-2.0
"""Apply, revert and inspect source patches of an installed package.

Without --patch: the set `records`, the patch step_timing_v2, which records steps and
requests. --patch NAME is that patch alone.
"""

from __future__ import annotations

import argparse

from kvtax.paths import REPOSITORY


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax patch`."""
    from kvtax.patcher import cli

    cli.configure(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the action; raises BlockPatchError."""
    from kvtax.patcher import cli

    return cli.run(arguments, REPOSITORY)
