# SPDX-License-Identifier: Apache-2.0
"""Routing policies as pure functions.

A new policy is a function with a row in POLICIES of `placement.py`, or of
`transfers.py` if KV moves, a row in the proxy's README and a test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvtax_fleet.policies import placement, transfers
from kvtax_fleet.policies.decision import Parameters, Policy

POLICIES: dict[str, Policy] = {**placement.POLICIES, **transfers.POLICIES}


class PolicyError(Exception):
    """A policy or a parameter that does not exist, or a value of the wrong type."""

    exit_code = 2


def parameters_of(policy: str, given: Mapping[str, Any]) -> Parameters:
    """Return the policy's parameters, by default its own. Raises PolicyError.

    Values may have their own type, or be text, as on a command line.
    """
    if policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise PolicyError(f"no policy {policy!r}; there are {known}")
    kind = POLICIES[policy].parameters
    try:
        parameters = msgspec.convert(dict(given), kind, strict=False)
        for name, value in msgspec.structs.asdict(parameters).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{value} is not finite - at `$.{name}`")
    except ValueError as error:  # msgspec's is one, too
        known = ", ".join(kind.__struct_fields__) or "none"
        raise PolicyError(f"policy {policy}: {error}; parameters: {known}") from None
    return parameters


def named_values(texts: Iterable[str]) -> dict[str, str]:
    """Parse the NAME=VALUE texts of a command line's `--parameters`."""
    return dict(text.partition("=")[::2] for text in texts)
