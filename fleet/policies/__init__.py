# SPDX-License-Identifier: Apache-2.0
"""Routing policies as pure functions, one file each.

POLICIES maps a name to its function, PARAMETERS to the type of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import msgspec

from . import (
    cache_aware,
    direct_read,
    elastic,
    elastic_study,
    linear,
    lmetric,
    load_only,
    migrate,
    pd_sep,
    round_robin,
    session_hash,
    weighted,
)
from .decision import Ask, Candidate, Decision, NoInstance, Policy, Snapshot

__all__ = [
    "BLIND_TO_CACHES",
    "MOVES_KV",
    "PARAMETERS",
    "POLICIES",
    "Ask",
    "Candidate",
    "Decision",
    "NoInstance",
    "Policy",
    "PolicyError",
    "Snapshot",
    "named_values",
    "parameters_of",
]

_MODULES: dict[str, ModuleType] = {
    "round_robin": round_robin,
    "load_only": load_only,
    "linear": linear,
    "lmetric": lmetric,
    "session_hash": session_hash,
    "cache_aware": cache_aware,
    "weighted": weighted,
    "pd_sep": pd_sep,
    "elastic": elastic,
    "elastic_study": elastic_study,
    "migrate": migrate,
    "direct_read": direct_read,
}
POLICIES: dict[str, Policy] = {name: one.decide for name, one in _MODULES.items()}
# Those whose decisions may move KV between instances.
MOVES_KV = frozenset({"pd_sep", "elastic", "elastic_study", "migrate"})
# Those that decide the same whatever is cached where.
BLIND_TO_CACHES = frozenset({"round_robin", "load_only", "session_hash"})
PARAMETERS: dict[str, type[msgspec.Struct]] = {
    name: one.Parameters for name, one in _MODULES.items()
}


class PolicyError(Exception):
    """A policy or a parameter that does not exist, or a value of the wrong type."""


def parameters_of(policy: str, given: Mapping[str, Any]) -> msgspec.Struct:
    """The policy's parameters, with defaults for those not given. Raises PolicyError.

    Values may have their own type, or be text, as on a command line.
    """
    if policy not in PARAMETERS:
        known = ", ".join(POLICIES)
        raise PolicyError(f"no policy {policy!r}; there are {known}")
    kind = PARAMETERS[policy]
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__) or "none"
        raise PolicyError(f"policy {policy}: {error}; parameters: {known}") from None


def named_values(texts: Iterable[str]) -> dict[str, str]:
    """The NAME=VALUE texts of a command line's `--parameters`, by name."""
    return dict(text.partition("=")[::2] for text in texts)
