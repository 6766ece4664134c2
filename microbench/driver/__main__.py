# SPDX-License-Identifier: Apache-2.0
"""Command line of the load driver.

exit status:
  0    every request ok, send lag within its budget
  2    a request failed, or the records could not be written
  3    no request failed, but p99 of the send lag is over its budget: run not valid
  4    no request failed, but the prefix cache was not reset as the plan asks
  64   the command line or the plan is wrong; nothing was sent
  130  stopped by SIGINT, 143 by SIGTERM: the rest is recorded as cancelled
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import NoReturn

from lab.load.plan import Plan, PlanError, read_plan
from lab.records.requests import DriverEnd
from microbench.driver.progress import print_forever
from microbench.driver.run import Run

FAILED, LATE, NOT_RESET, USAGE, BY_SIGNAL = 2, 3, 4, 64, 128


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.format_usage()}{self.prog}: error: {message}\n")


def main() -> int:
    """Run the driver; return its exit status."""
    parser = _Parser(
        "python -m microbench.driver",
        description="Send the requests of a plan at their scheduled times.",
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", required=True, help="http://127.0.0.1:PORT")
    parser.add_argument("--plan", required=True, type=Path, help="plan, a JSON file")
    parser.add_argument("--out", required=True, type=Path, help="records, a new file")
    parser.add_argument(
        "--progress", action="store_true", help="a line a second on stderr"
    )
    arguments = parser.parse_args()
    if not arguments.url.startswith(("http://", "https://")):
        parser.error(f"--url {arguments.url}: must begin with http:// or https://")
    try:
        plan = read_plan(arguments.plan)
        return asyncio.run(_drive(arguments, plan))
    except PlanError as error:
        parser.error(str(error))
    except FileExistsError:
        parser.error(f"--out {arguments.out}: exists; records are never overwritten")
    except OSError as error:
        return _say(FAILED, f"{error}")


async def _drive(arguments: argparse.Namespace, plan: Plan) -> int:
    run = Run(arguments.url, plan, arguments.out)
    printing = asyncio.create_task(print_forever(run)) if arguments.progress else None
    end = await run.execute()
    if printing is not None:
        printing.cancel()
    return _verdict(run, end)


def _verdict(run: Run, end: DriverEnd) -> int:
    """Say on stderr what is wrong with the run; the exit status for the worst of it."""
    if (signum := run.stop.received) is not None:
        done = f"{end.ok} ok, {end.failed} failed, {end.cancelled} cancelled"
        return _say(BY_SIGNAL + signum, f"stopped by {signum.name}: {done}")
    status = 0
    if not end.valid and end.lag_ms is not None:
        status = _say(
            LATE,
            f"RUN NOT VALID: requests were sent late, lag {end.lag_ms} ms, "
            f"budget for p99 {end.lag_budget_ms:g} ms",
        )
    if run.reset_error is not None:
        status = _say(NOT_RESET, run.reset_error)
    if end.failed:
        status = _say(FAILED, f"{end.failed} of {end.scheduled} requests failed")
    return status


def _say(status: int, message: str) -> int:
    print(f"driver: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
