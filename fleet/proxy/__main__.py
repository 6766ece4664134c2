# SPDX-License-Identifier: Apache-2.0
"""`python -m fleet.proxy`: a cache-aware reverse proxy in front of vLLM instances.

Prints its URL as the first line of its output and serves until SIGINT or SIGTERM.
Exit status: 0 stopped, 2 bad arguments or files, 1 anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from fleet.instances import InstancesError, read_instances
from fleet.policies import POLICIES, PolicyError, named_values
from lab.load.open_files import allow_open_files
from lab.records.instances import Instance

from .app import serving
from .settings import Settings, SettingsError, resolved
from .shared import Seat, Shared
from .tokenizer import TokenizerError
from .workers import keep, listening

_DEFAULTS = Settings(policy="")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m fleet.proxy",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    where = made.add_mutually_exclusive_group(required=True)
    where.add_argument("--instances", type=Path, help="a kvtax.instances/1 file")
    where.add_argument("--url", action="append", metavar="NAME=URL", help="an instance")
    made.add_argument("--policy", choices=list(POLICIES), required=True)
    made.add_argument("--parameters", nargs="*", default=[], metavar="NAME=VALUE")
    made.add_argument(
        "--kvindexd",
        metavar="ADDRESS",
        help="ask this one, unix:///PATH or tcp://HOST:PORT, what is cached where",
    )
    made.add_argument("--tokenizer", metavar="FOLDER", help="of the model served")
    made.add_argument("--log", type=Path, help="decisions.jsonl, which must not exist")
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=0, help="0: any free one")
    for field, what in {
        "mirror_tokens": "tokens that the mirror assumes an instance to hold",
        "max_body_bytes": "a longer body is answered with 413",
        "silence_timeout_s": "how long an instance may send nothing",
        "client_timeout_s": "how long a client may take nothing of its stream",
        "prefill_timeout_s": "for an offloaded prefill",
        "handover_timeout_s": "from an offloaded prefill to the first byte",
        "workers": "processes that serve, each on a core of its own",
    }.items():
        default = getattr(_DEFAULTS, field)
        option = "--" + field.replace("_", "-")
        made.add_argument(option, type=type(default), default=default, help=what)
    return made


def instances_of(options: argparse.Namespace) -> list[Instance]:
    """Raises InstancesError."""
    if options.instances is not None:
        return read_instances(options.instances)
    named = [text.partition("=") for text in options.url]
    if bad := [name for name, _, url in named if not url.startswith("http")]:
        raise InstancesError(f"--url {bad[0]}: NAME=http://... expected")
    if len({name for name, _, _ in named}) < len(named):
        raise InstancesError("--url: two instances have the same name")
    return [Instance(name, url.rstrip("/")) for name, _, url in named]


def settings_of(options: argparse.Namespace) -> Settings:
    known = {n: v for n, v in vars(options).items() if n in Settings.__struct_fields__}
    parameters = named_values(options.parameters)
    cache = "mirror" if options.kvindexd is None else "exact"
    return Settings(**{**known, "parameters": parameters, "cache": cache})


async def serve(
    options: argparse.Namespace,
    instances: list[Instance],
    serves: Callable[[int], None],
    bound: socket.socket | None = None,
    seat: Seat | None = None,
) -> None:
    """Until SIGINT or SIGTERM; `serves` is called with the port once it does."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log = options.log
    if log is not None and seat is not None:
        log = log.with_stem(f"{log.stem}.{seat.number}")
    where = options.host, options.port, bound, seat
    async with serving(instances, settings_of(options), log, *where) as port:
        serves(port)
        await stop.wait()


def serve_by_workers(options: argparse.Namespace, instances: list[Instance]) -> int:
    """The exit status. Raises SettingsError, PolicyError and OSError."""
    resolved(instances, settings_of(options))
    shared = Shared(options.workers, [one.name for one in instances])
    bound = listening(options.host, options.port, options.workers)
    port = bound[0].getsockname()[1]

    def one(seat: Seat, serves: Callable[[], None]) -> int:
        at = bound[seat.place], seat
        return status_of(
            lambda: run(serve(options, instances, lambda _: serves(), *at))
        )

    return keep(options.workers, shared, one, lambda: say(options.host, port))


def say(host: str, port: int) -> None:
    print(f"http://{host}:{port}", flush=True)


def run(main: Coroutine[Any, Any, None]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)
    return 0


def status_of(work: Callable[[], int]) -> int:
    """The exit status that it returns, or that fits what it raises, which is said."""
    try:
        return work()
    except (InstancesError, PolicyError, SettingsError, TokenizerError) as error:
        print(error, file=sys.stderr)
        return 2
    except FileExistsError as error:
        print(f"{error.filename}: exists already", file=sys.stderr)
        return 2
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


def work(options: argparse.Namespace) -> int:
    instances = instances_of(options)
    if options.workers != 1:
        return serve_by_workers(options, instances)
    return run(serve(options, instances, lambda port: say(options.host, port)))


def main() -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = parser().parse_args()
    allow_open_files()  # two sockets per request
    # transformers would load PyTorch, of which tokenizers need nothing: 700 MB.
    os.environ["USE_TORCH"] = "0"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    # A request leaves the collector little to find, and a collection walks everything.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    return status_of(lambda: work(options))


if __name__ == "__main__":
    sys.exit(main())
