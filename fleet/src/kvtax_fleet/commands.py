# SPDX-License-Identifier: Apache-2.0
"""Subcommands that kvtax finds by the entry points `kvtax.commands`."""

from kvtax.cli import Command

PACKAGE = "./fleet"
TRACE = Command(
    "trace", "describe and sample request traces", "kvtax_fleet.cli.trace", PACKAGE
)
PROXY = Command("proxy", "route to instances", "kvtax_fleet.cli.proxy", PACKAGE)
FLEET = Command(
    "fleet",
    "compare policies on many instances",
    "kvtax_fleet.cli.fleet",
    PACKAGE,
    default_action="run",
)
