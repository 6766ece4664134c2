# SPDX-License-Identifier: Apache-2.0
"""Command line of the replayer.

exit status:
  0    every request ok, send lag within its budget
  2    a request failed or was cancelled, or the records could not be written
  3    all requests ok, but p99 of the send lag is over its budget: run not valid
  64   command line, trace and server do not fit together; nothing was sent
  130  stopped by SIGINT, 143 by SIGTERM: the rest is recorded as cancelled

OPENAI_API_KEY is sent to the server if set.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from fleet.replay.gate import Gate
from fleet.replay.options import Options, ReplayError
from fleet.replay.progress import print_forever, summary
from fleet.replay.run import Replay
from fleet.replay.sessions import group
from fleet.trace import TraceError, read_trace
from lab.serving.supervise import exit_on_signals

FAILED, LATE, USAGE, BY_SIGNAL = 2, 3, 64, 128


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.format_usage()}{self.prog}: error: {message}\n")


def main() -> int:
    """Replay; return the exit status."""
    exit_on_signals()
    parser = _parser()
    arguments = parser.parse_args()
    if not arguments.url.startswith(("http://", "https://")):
        parser.error(f"--url {arguments.url}: must begin with http:// or https://")
    if arguments.closed_loop and arguments.max_inflight_sessions is None:
        parser.error("--closed-loop: give --max-inflight-sessions, too")
    fields = {name: getattr(arguments, name) for name in Options.__struct_fields__}
    try:
        options = Options(**fields)
        sessions = group(read_trace(arguments.trace), arguments.request_limit)
        gate = arguments.gate and Gate(arguments.gate)
        replay = Replay(options, sessions, arguments.out, gate)
        return asyncio.run(_replay(replay, arguments.progress))
    except (ReplayError, TraceError) as error:
        parser.error(str(error))
    except FileExistsError:
        parser.error(f"--out {arguments.out}: exists; records are never overwritten")
    except OSError as error:
        print(f"replay: {error}", file=sys.stderr)
        return FAILED


async def _replay(replay: Replay, progress: bool) -> int:
    printing = asyncio.create_task(print_forever(replay)) if progress else None
    with open(replay.options.trace, "rb") as trace:
        digest = hashlib.file_digest(trace, "sha256").hexdigest()
    end = await replay.execute(trace_sha256=digest)
    if printing is not None:
        printing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await printing
    print(summary(end), file=sys.stderr)
    if (signum := replay.stop.received) is not None:
        print(f"replay: stopped by {signum.name}", file=sys.stderr)
        return BY_SIGNAL + signum
    if end.failed or end.cancelled:
        return FAILED
    return 0 if end.valid else LATE


def _parser() -> _Parser:
    parser = _Parser(
        "python -m fleet.replay",
        description="Replay a trace: open loop across sessions, closed loop in one.",
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Options("", "")
    add = parser.add_argument
    add("--url", required=True, type=lambda url: url.rstrip("/"), help="server's root")
    add("--trace", required=True, help="any format that fleet.trace reads")
    add("--out", required=True, type=Path, help="records, a new file")
    add("--model", help="default: the server's only one")
    add("--vocab-size", type=_at_least(2), default=default.vocab_size)
    add(
        "--time-scale",
        type=_at_least(0.001, float),
        default=default.time_scale,
        help="how much faster than the trace: divides arrival and think times "
        "(default 1)",
    )
    add(
        "--max-inflight-sessions",
        type=_at_least(1),
        metavar="N",
        help="a session that arrives while N are in flight waits for one to end",
    )
    add(
        "--closed-loop",
        action="store_true",
        help="all sessions wait for one of N to end, whenever they arrive",
    )
    add(
        "--request-limit",
        type=_at_least(1),
        metavar="N",
        help="only the first N requests of the trace",
    )
    add(
        "--timeout",
        dest="timeout_s",
        type=_at_least(0.001, float),
        default=default.timeout_s,
        metavar="S",
        help="for a whole answer (default 600)",
    )
    add(
        "--lag-budget-ms",
        type=_at_least(0.001, float),
        default=default.lag_budget_ms,
        help="for p99 of the send lag (default 50)",
    )
    add(
        "--warmup-s",
        type=_at_least(0, float),
        default=default.warmup_s,
        help="the steady window begins no sooner (default 0)",
    )
    add(
        "--share",
        type=_share,
        metavar="I/N",
        help="only every Nth session, from the Ith on, which counts from 0: other "
        "replayers send the others",
    )
    add(
        "--gate",
        type=Path,
        metavar="FOLDER",
        help="begin at the moment that its file `start` holds: fleet/replay/gate.py",
    )
    add("--progress", action="store_true", help="one line per second on stderr")
    return parser


def _share(text: str) -> tuple[int, int]:
    number, _, replayers = text.partition("/")
    if not (number.isdigit() and replayers.isdigit() and int(number) < int(replayers)):
        raise argparse.ArgumentTypeError(f"{text}: I/N with I below N expected")
    return int(number), int(replayers)


def _at_least(least: float, kind: type = int) -> Callable[[str], float]:
    def number(text: str) -> float:
        if not least <= (value := kind(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: must be {least:g} or more")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
