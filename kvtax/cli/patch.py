# SPDX-License-Identifier: Apache-2.0
"""Apply, revert and inspect source patches of an installed package.

Without --patch: the set `timing`, which records steps and requests; --patch all adds
the fixes.
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
