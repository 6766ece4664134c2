# SPDX-License-Identifier: Apache-2.0
"""Route requests to many vLLM instances, by load and by what is cached where.

Prints the proxy's URL as its first line, the URL of its control surface as the second,
and serves until SIGINT or SIGTERM. It is an instrument for experiments, not for
production. The smallest instances file is one line:

    instances = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]

Policies that move KV need more fields: kvtax look --fields instances.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvtax.cli.options import whole_number

from kvtax_fleet.cli.options import add_parameters, add_settings, fields_of
from kvtax_fleet.policies import named_values
from kvtax_fleet.proxy.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax proxy`."""
    instances = parser.add_mutually_exclusive_group(required=True)
    instances.add_argument(
        "--instances",
        type=Path,
        metavar="FILE",
        help="TOML or JSON file of the instances, such as instances.json of a fleet",
    )
    instances.add_argument(
        "--url", action="append", metavar="[NAME=]URL", help="an instance; repeatable"
    )
    add_settings(parser, Settings)
    add_parameters(parser)
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="new file for decisions.jsonl"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to serve (default: %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=whole_number(0, 65_535),
        default=0,
        metavar="PORT",
        help="port to serve (default: a free one)",
    )
    parser.add_argument(
        "--control-port",
        type=whole_number(0, 65_535),
        default=0,
        metavar="PORT",
        help="port of 127.0.0.1 with /decisions, /breakdown and /health for "
        "operators (default: a free one)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; raises InstancesError, SettingsError and OSError."""
    from kvtax_fleet.instances import instances_of_urls, read_instances
    from kvtax_fleet.proxy.service import Endpoint, serve

    if arguments.instances is None:
        instances = instances_of_urls(arguments.url)
    else:
        instances = read_instances(arguments.instances)
    others: dict[str, Any] = {}
    if arguments.parameters:
        others["parameters"] = named_values(arguments.parameters)
    settings = fields_of(arguments, Settings, **others)
    endpoint = Endpoint(arguments.host, arguments.port, arguments.control_port)
    return serve(instances, settings, arguments.log, endpoint)
