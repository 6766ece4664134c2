# SPDX-License-Identifier: Apache-2.0
"""Subcommands that kvtax finds by the entry points `kvtax.commands`."""

from kvtax.cli import Command

TRACE = Command(
    "trace", "read, sample, anonymise request traces", "kvtax_fleet.cli.trace"
)
PROXY = Command("proxy", "route requests to instances", "kvtax_fleet.cli.proxy")
FLEET = Command(
    "fleet",
    "compare policies on many instances",
    "kvtax_fleet.cli.fleet",
    default_action="run",
)
