# SPDX-License-Identifier: Apache-2.0
"""How often would another policy have decided otherwise, given what the proxy saw?

Every recorded snapshot is given to every policy again (fleet.policies.replay). That
says how far apart two policies are, decision by decision; not what would have followed,
as the snapshots come from the policy that ran. The policy that ran, given its own
snapshots and parameters, must decide as it did: else the record is not complete.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleet.policies import POLICIES, NoInstance, PolicyError, parameters_of
from fleet.policies.replay import differences, read_decisions
from lab.records import RecordsError


def disagreements(folder: Path) -> dict[str, Any] | None:
    """{policy: {n, other_instance, other_prefill, ran}}: shares of the n decisions.

    The policy that ran has its own parameters, others their defaults. A policy that
    does not fit the fleet (no instance of the role it needs) is None. None in all
    without decisions. Raises RecordsError.
    """
    path = folder / "decisions.jsonl"
    if not path.exists():
        return None
    try:
        header, recorded = read_decisions(path)
        found: dict[str, Any] = {}
        for policy in POLICIES if recorded else ():
            ran = policy == header.policy
            parameters = parameters_of(policy, header.parameters if ran else {})
            try:
                n, differ = differences(recorded, policy, parameters)
            except NoInstance:
                found[policy] = None
                continue
            found[policy] = {
                "n": n,
                "other_instance": round(differ["instance"] / n, 5),
                "other_prefill": round(differ["prefill"] / n, 5),
                "ran": ran,
            }
    except PolicyError as error:
        raise RecordsError(str(error)) from None
    return found or None
