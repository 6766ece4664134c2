# SPDX-License-Identifier: Apache-2.0
"""Read the files of a fleet run: one folder per arm and repeat, found by its arm.json.

A writer that was killed leaves at most one torn last line: dropped and counted. A bad
line anywhere else means that the file is not what it claims to be: RecordsError.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lab.records import RecordsError
from lab.records.roles import Role

ARM_SCHEMA = "kvtax.arm/1"
REPLAY_SCHEMA = "kvtax.replay/1"
DECISIONS_SCHEMA = "kvtax.decisions/1"

Line = TypeVar("Line")


class InstanceEntry(msgspec.Struct):
    """An instance as arm.json names it; analysis needs no more of it."""

    name: str
    role: str = "both"
    block_tokens: int = 16


class FreshnessEntry(msgspec.Struct):
    """Whether the instances were proven fresh, and why not."""

    fresh: bool = False
    why: str | None = None


class MachineEntry(msgspec.Struct):
    """Why the machine could not keep up; None if it could."""

    saturated: str | None = None


class ArmFile(msgspec.Struct):
    """arm.json: what ran. What analysis does not use is not named here.

    `baseline` and `same_as` are arms: what this one is compared with, and the one that
    it repeats (an A/A pair). `report` is the connector's; runs made before it was noted
    have none.
    """

    schema: str
    arm: str
    repeat: int
    experiment: str | None = None
    policy: str | None = None
    connector: str | None = None
    report: Role | None = None
    concurrency: int | None = None
    baseline: str | None = None
    same_as: str | None = None
    instances: list[InstanceEntry] = []
    status: str = "ok"
    error: str | None = None
    freshness: FreshnessEntry | None = None
    machine: MachineEntry | None = None
    cache_state: str | None = None
    trace: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    open_loop: bool | None = None
    time_scale: float | None = None
    time_factor: float | None = None


class RequestLine(msgspec.Struct, tag_field="type", tag="request"):
    """What became of one request; a moment that never came is None."""

    id: str
    session: str
    turn: int
    status: str
    arrival_s: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    intended_ns: int | None = None
    sent_ns: int | None = None
    first_token_ns: int | None = None
    end_ns: int | None = None
    error: str | None = None
    http_status: int | None = None
    instance: str | None = None
    prefill_instance: str | None = None
    usage_prompt_tokens: int | None = None
    usage_completion_tokens: int | None = None
    cached_tokens: int | None = None
    window: str | None = None


class CandidateEntry(msgspec.Struct):
    name: str
    cached_tokens: int = 0


class SnapshotEntry(msgspec.Struct):
    candidates: list[CandidateEntry] = []


class DecisionLine(msgspec.Struct, tag_field="type", tag="decision"):
    """One decision, as far as analysis needs it."""

    id: str
    instance: str | None = None
    prefill_instance: str | None = None
    read_from: str | None = None
    kind: str | None = msgspec.field(name="class", default=None)
    prompt_tokens: int | None = None
    snapshot: SnapshotEntry | None = None

    def believed_cached(self, instance: str | None) -> int | None:
        """Tokens of the prompt that the proxy took to be cached at `instance`."""
        for candidate in self.snapshot.candidates if self.snapshot else ():
            if candidate.name == instance:
                return candidate.cached_tokens
        return None


class DecisionEnd(msgspec.Struct, tag_field="type", tag="end"):
    """How a request ended at the proxy, and whose prefill was really used."""

    id: str
    prefill_instance: str | None = None
    fallback: str | None = None


class ReplayEnd(msgspec.Struct, tag_field="type", tag="end"):
    """The replayer's last line; absent if it was killed."""

    lag_ms: dict[str, float] | None = None
    lag_budget_ms: float | None = None
    valid: bool | None = None
    steady: dict[str, int] | None = None


class Header(msgspec.Struct):
    """The first line of a file of records."""

    schema: str | None = None


@dataclass(frozen=True)
class ArmRun:
    """One arm in one repeat. `end` is None if the replayer was killed.

    `counters`: /metrics texts (before, after) by instance.
    """

    folder: Path
    info: ArmFile
    requests: list[RequestLine]
    end: ReplayEnd | None
    decisions: list[DecisionLine]
    decision_ends: list[DecisionEnd]
    counters: dict[str, tuple[str, str]]
    torn_lines: int


def read_run(run_dir: Path) -> list[ArmRun]:
    """Every arm and repeat below `run_dir`: by concurrency, the baseline first.

    Raises RecordsError when there is none, or a file of one is wrong.
    """
    found = sorted(run_dir.rglob("arm.json"))
    if not found:
        raise RecordsError(f"{run_dir}: no arm.json in it or below: not a fleet run")
    runs = [read_arm(path.parent) for path in found]
    return sorted(runs, key=_place)


def _place(run: ArmRun) -> tuple:
    info = run.info
    return info.concurrency or 0, info.arm != info.baseline, info.arm, info.repeat


def read_arm(folder: Path) -> ArmRun:
    """The files of one arm and repeat. Without replay.jsonl it has no requests."""
    info = _decode(folder / "arm.json", ArmFile)
    if info.schema != ARM_SCHEMA:
        raise RecordsError(
            f"{folder / 'arm.json'}: schema {info.schema!r}, not {ARM_SCHEMA!r}"
        )
    replayed, torn = _lines(
        folder / "replay.jsonl", REPLAY_SCHEMA, RequestLine | ReplayEnd
    )
    decided, torn_too = _lines(
        folder / "decisions.jsonl", DECISIONS_SCHEMA, DecisionLine | DecisionEnd
    )
    ends = [line for line in replayed if isinstance(line, ReplayEnd)]
    return ArmRun(
        folder=folder,
        info=info,
        requests=[line for line in replayed if isinstance(line, RequestLine)],
        end=ends[-1] if ends else None,
        decisions=[line for line in decided if isinstance(line, DecisionLine)],
        decision_ends=[line for line in decided if isinstance(line, DecisionEnd)],
        counters=_counters(folder / "metrics"),
        torn_lines=torn + torn_too,
    )


def _decode(path: Path, kind: type[Line]) -> Line:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise RecordsError(f"{path}: {error}") from None


def _lines(path: Path, schema: str, kind: Any) -> tuple[list[Any], int]:
    """The lines after the header, and how many torn ones were dropped (0 or 1)."""
    if not path.exists():
        return [], 0
    kept: list[Any] = []
    decode = msgspec.json.Decoder(kind).decode
    for number, line, is_last in _numbered(path):
        try:
            if number == 1:
                header = msgspec.json.decode(line, type=Header)
                if header.schema != schema:
                    raise RecordsError(
                        f"{path}: schema {header.schema!r}, not {schema!r}"
                    )
            else:
                kept.append(decode(line))
        except msgspec.DecodeError as error:
            if is_last and not line.endswith(b"\n"):
                return kept, 1
            raise RecordsError(f"{path}:{number}: {error}") from None
    return kept, 0


def _numbered(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(line number, line, whether it is the last), one line held back."""
    with path.open("rb") as file:
        held = file.readline()
        number = 1
        while held:
            after = file.readline()
            yield number, held, not after
            held, number = after, number + 1


def _counters(folder: Path) -> dict[str, tuple[str, str]]:
    """Text of /metrics before and after, of each instance that has both."""
    found = {}
    for before in sorted(folder.glob("*.before.prom")):
        name = before.name.removesuffix(".before.prom")
        after = folder / f"{name}.after.prom"
        if after.exists():
            found[name] = (before.read_text(), after.read_text())
    return found
