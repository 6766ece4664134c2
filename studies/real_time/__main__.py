# SPDX-License-Identifier: Apache-2.0
"""Set a fleet in real time beside its virtual twin, request by request.

    python -m studies.real_time REAL_RUN VIRTUAL_RUN [--out FILE.json]

The runs are folders of `kvtax fleet` of the same experiment. Repeat 0 of the virtual
run has the sessions in the order of all repeats in real time. A request's ratio is the
mean of its times in real time over its virtual time. Repeats with which the machine did
not keep up are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kvtax_fleet.analyze.arm_runs import ArmRun, read_run

from kvtax.records.files import write_document
from kvtax.report.markdown import table

# Times in ms by arm and request, one for each repeat.
Times = dict[str, dict[str, list[float]]]
METRICS = {"ttft_ms": "first_token_ns", "e2e_ms": "end_ns"}


def times_of(runs: list[ArmRun], field: str) -> Times:
    """Collect the time from sending a request to its moment `field`."""
    times: Times = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for request in run.requests:
            moment_ns = getattr(request, field)
            if request.status == "ok" and moment_ns and request.sent_ns:
                elapsed_ms = (moment_ns - request.sent_ns) / 1e6
                times[run.info.arm][request.id].append(elapsed_ms)
    return times


def compared(real: list[ArmRun], virtual: list[ArmRun]) -> dict[str, Any]:
    """Compare both runs, by arm and metric."""
    real = [run for run in real if run.info.machine and not run.info.machine.saturated]
    twins = [run for run in virtual if run.info.repeat == 0]
    result: dict[str, Any] = {}
    for metric, field in METRICS.items():
        measured, simulated = times_of(real, field), times_of(twins, field)
        for arm, requests in measured.items():
            ratios = {
                name: fmean(values) / fmean(simulated[arm][name])
                for name, values in requests.items()
            }
            real_ms = fmean(fmean(values) for values in requests.values())
            virtual_ms = fmean(fmean(values) for values in simulated[arm].values())
            result.setdefault(arm, {})[metric] = {
                "repeats": max(map(len, requests.values())),
                "real_mean": real_ms,
                "virtual_mean": virtual_ms,
                "ratio_of_means": real_ms / virtual_ms,
                "ratio_by_request": ratios,
            }
    return result


def text(arms: dict[str, Any]) -> str:
    """Format a comparison as Markdown."""
    rows = []
    for arm, metrics in arms.items():
        for metric, each in metrics.items():
            ratios = list(each["ratio_by_request"].values())
            spread = f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
            real, virtual = each["real_mean"], each["virtual_mean"]
            rows.append(
                [
                    f"`{arm}`",
                    f"{each['repeats']}",
                    metric.removesuffix("_ms").upper(),
                    f"{real:,.0f}",
                    f"{virtual:,.0f}",
                    f"{each['ratio_of_means']:.2f}",
                    spread,
                ]
            )
    columns = ["arm", "repeats", "", "real, ms", "virtual, ms", "ratio", "by request"]
    return table(columns, rows)


def main() -> int:
    """Compare the runs that the command line names."""
    parser = argparse.ArgumentParser("python -m studies.real_time", description=__doc__)
    parser.add_argument("real", type=Path)
    parser.add_argument("virtual", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    real, virtual = read_run(arguments.real), read_run(arguments.virtual)
    arms = compared(real, virtual)
    print(text(arms))
    if arguments.out is not None:
        facts = real[0].info.versions | {"command_line": "python -m studies.real_time"}
        write_document(arguments.out, {"provenance": facts, "arms": arms})
    return 0


if __name__ == "__main__":
    sys.exit(main())
