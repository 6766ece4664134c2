# SPDX-License-Identifier: Apache-2.0
"""Decide recorded snapshots again: `python -m fleet.policies.replay decisions.jsonl`.

With `--policy` (and `--parameters`) another policy decides the very same snapshots, and
the output says how often it differs. This compares decisions, not outcomes: the later
snapshots follow from the recorded decisions. Without `--policy` the recorded policy
decides again, which must give the same decisions.

Exit status: 0, 1 if the recorded policy decides otherwise than recorded, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from . import POLICIES, Ask, Decision, PolicyError, Snapshot, parameters_of

SCHEMA = "kvtax.decisions/1"


class Header(msgspec.Struct):
    """First line of a decisions file, as far as it matters here."""

    schema: str
    policy: str
    parameters: dict[str, Any]


class Recorded(msgspec.Struct, rename={"kind": "class", "prefill": "prefill_instance"}):
    """A decision line: what the policy was given, and what it said."""

    session: str | None
    prompt_tokens: int
    instance: str
    prefill: str | None
    read_from: str | None
    reason: str
    kind: str | None
    scores: dict[str, float]
    snapshot: Snapshot

    @property
    def ask(self) -> Ask:
        return Ask(self.session, self.prompt_tokens)

    @property
    def decision(self) -> Decision:
        return Decision(
            self.instance,
            self.prefill,
            self.read_from,
            self.scores,
            self.reason,
            self.kind,
        )


def read_decisions(path: Path) -> tuple[Header, Iterator[Recorded]]:
    """The header, and the decisions in order. Raises PolicyError.

    A torn last line, which a killed proxy leaves, is passed over.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror}") from None
    try:
        header = msgspec.json.decode(lines[0], type=Header)
    except msgspec.DecodeError as error:
        raise PolicyError(f"{path}:1: no header of {SCHEMA}: {error}") from None
    if header.schema != SCHEMA:
        raise PolicyError(f"{path}:1: schema is {header.schema!r}, not {SCHEMA}")
    return header, _decisions(path, lines[1:-1])


def _decisions(path: Path, lines: list[bytes]) -> Iterator[Recorded]:
    decode = msgspec.json.Decoder(Recorded).decode
    for number, line in enumerate(lines, 2):
        if not line.startswith(b'{"type":"decision"'):
            continue
        try:
            yield decode(line)
        except msgspec.DecodeError as error:
            raise PolicyError(f"{path}:{number}: {error}") from None


def differences(
    recorded: Iterator[Recorded], policy: str, parameters: msgspec.Struct
) -> tuple[int, dict[str, int]]:
    """How many decisions there are, and how many differ in each field."""
    decide = POLICIES[policy]
    differ = dict.fromkeys(Decision.__struct_fields__, 0)
    total = 0
    for one in recorded:
        total += 1
        again = decide(one.ask, one.snapshot, parameters)
        for field in differ:
            differ[field] += getattr(again, field) != getattr(one.decision, field)
    return total, differ


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleet.policies.replay", description=__doc__.splitlines()[0]
    )
    parser.add_argument("decisions", type=Path)
    parser.add_argument("--policy", choices=list(POLICIES))
    parser.add_argument("--parameters", nargs="*", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(arguments)
    try:
        header, recorded = read_decisions(options.decisions)
        policy = options.policy or header.policy
        given = dict(text.partition("=")[::2] for text in options.parameters)
        same = policy == header.policy and not given
        parameters = parameters_of(policy, header.parameters if same else given)
        total, differ = differences(recorded, policy, parameters)
    except PolicyError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{total} decisions by {header.policy}, again by {policy} {parameters}")
    for field in ("instance", "prefill", "read_from"):
        share = differ[field] / total if total else 0.0
        print(f"  {field} differs in {differ[field]} ({share:.1%})")
    if same and any(differ.values()):
        print(f"not reproduced, fields that differ: {differ}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
