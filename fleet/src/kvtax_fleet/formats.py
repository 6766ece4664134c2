# SPDX-License-Identifier: Apache-2.0
"""File formats of the fleet bench, for `kvtax look --fields`."""

from __future__ import annotations

from kvtax.records.formats import Format

from kvtax_fleet.analyze.analysis import FleetAnalysis
from kvtax_fleet.records import arm, decisions, host_times, instances

FORMATS = (
    Format("experiment.json", "The arms and runs as planned.", (arm.ExperimentRecord,)),
    Format("arm.json", "One arm in one repeat.", (arm.ArmRecord,)),
    Format("instances.json", "The instances of a fleet.", (instances.InstancesFile,)),
    Format(
        "decisions.jsonl",
        "Decisions of the proxy. A request to a completion endpoint has exactly one "
        "`end`; one that reached a decision has a `decision` before it, and a second "
        "one after a retry. No line has text of a prompt or an answer.",
        (
            decisions.DecisionsHeader,
            decisions.DecisionRecord,
            decisions.DecisionEnd,
        ),
    ),
    Format(
        "breakdown.json",
        "The proxy's /breakdown after the last request of a run.",
        (decisions.Breakdown,),
    ),
    Format("analysis.json", "The analysis of an experiment.", (FleetAnalysis,)),
    Format(
        "hosts/*.json",
        "Times of a host per step and per request, for virtual time.",
        (host_times.HostTimes,),
    ),
)
