# SPDX-License-Identifier: Apache-2.0
"""Command line of the stand-in: serve until SIGINT or SIGTERM.

Prints its URL as the first line of its output once it listens. Exit status: 0 after a
signal, 1 if the port is taken, 64 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import NoReturn

import msgspec
from aiohttp import web

from fleet.standin.app import StandinInstance
from fleet.standin.engine import Shape
from fleet.standin.faults import FAULTS, Faults, UnknownFault

USAGE = 64


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.format_usage()}{self.prog}: error: {message}\n")


def main() -> int:
    """Serve; return the exit status."""
    faults = "\n".join(f"  {name:12} {what}" for name, what in FAULTS.items())
    parser = _Parser(
        "python -m fleet.standin",
        description=__doc__,
        epilog=f"faults:\n{faults}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", default="null")
    parser.add_argument("--faults", default="", help="cycle of faults, by comma")
    parser.add_argument("--fault-after", type=int, default=1, metavar="TOKENS")
    parser.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="end with the process that started it",
    )
    for field in msgspec.structs.fields(Shape):
        option = f"--{field.name.replace('_', '-')}"
        kind = type(field.default)
        parser.add_argument(option, type=kind, default=field.default)
    arguments = parser.parse_args()
    shape = Shape(
        **{name: getattr(arguments, name) for name in Shape.__struct_fields__}
    )
    try:
        names = [name for name in arguments.faults.split(",") if name]
        faults = Faults(names, arguments.fault_after)
    except UnknownFault as error:
        parser.error(str(error))
    try:
        asyncio.run(_serve(arguments, StandinInstance(arguments.model, shape, faults)))
    except OSError as error:
        print(f"standin: port {arguments.port}: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(arguments: argparse.Namespace, instance: StandinInstance) -> None:
    runner = web.AppRunner(
        instance.app(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, arguments.host, arguments.port, backlog=4096)
        await site.start()
        host, port = runner.addresses[0][:2]
        instance.transfers.host, instance.transfers.port = host, port
        print(f"http://{host}:{port}", flush=True)
        await _until_told(arguments.until_stdin_closes)
    finally:
        await runner.cleanup()


async def _until_told(stdin_counts: bool) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    if stdin_counts:
        loop.add_reader(sys.stdin, told.set)
    await told.wait()


if __name__ == "__main__":
    sys.exit(main())
