# SPDX-License-Identifier: Apache-2.0
"""A reason to doubt a number: one type for sweeps, fleets, gates and `kvtax look`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec


def encodable(text: str) -> str:
    """Show as escapes what is no UTF-8, as a file's name may be."""
    return text.encode(errors="backslashreplace").decode()


class RunWarning(msgspec.Struct, frozen=True):
    """A reason to doubt a number, and what to do about it."""

    kind: str
    """What is doubtful, in a word or two: `few_sessions`."""
    place: str
    """Config, arm, instance or file that it is about; empty for the whole run."""
    message: str
    """The finding with its figures, without a full stop."""
    remedy: str
    """What to do about it, as a sentence in the imperative."""

    def __post_init__(self) -> None:
        """Have a place and a message that can be printed, whatever files they name."""
        for field in ("place", "message"):
            text = getattr(self, field)
            if not text.isascii():
                msgspec.structs.force_setattr(self, field, encodable(text))

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy.rstrip('.')}."

    def within(self, place: str) -> RunWarning:
        """Put `place`, such as an instance's name, in front of the warning's own."""
        inner = "/".join(filter(None, (place, self.place)))
        return RunWarning(self.kind, inner, self.message, self.remedy)


RECORD = "Record with kvtax run --records DIR -- vllm serve ..."
QUIETER = "stop what else runs on the machine, or use one whose cores are not shared"
LOOK_AT_CLOCK = "They are left out; look at the host's clock"


class Warn(Enum):
    """Kinds of warnings: text and remedy, both filled in with the facts of a case."""

    # Files of records.
    UNREADABLE = "{error}", "{what} is left out; see the file"
    ANOTHER_LIFE = (
        "{path}: {why}",
        "The file is left out; keep the records of each life in a folder of its own",
    )
    TORN_LINES = "{lines} left out", "Nothing: a stopped writer leaves one"
    BAD_LINES = "{first}{more}", "They are left out, the rest is shown; see the file"
    NO_WORKER = (
        "no records of a worker ({why}): its calls and the model count as other",
        f"{RECORD}. Let the workers write to the same folder",
    )
    STEPS_WITHOUT_WORKER = (
        "{count:,} of {steps:,} steps have no record of a worker",
        "See whether the worker's file ends early; its calls are missing there",
    )
    NOT_TIMED = "not timed: {why}", "Their time counts as scheduler, model or other"
    CONNECTOR_UNKNOWN = (
        "no call of a connector was timed: what it costs is unknown",
        f"Nothing if the server has no connector; else: {RECORD}. The file's header "
        "names what could not be timed",
    )
    OPEN_STEPS = (
        "{count:,} steps were scheduled and never ended",
        "They are left out; the engine was stopped, or failed, in them",
    )
    IMPOSSIBLE_STEPS = (
        "{count:,} steps took less than nothing or over an hour, or have counts below "
        "zero",
        LOOK_AT_CLOCK,
    )
    CLOCK = (
        "the clock jumped: {count:,} steps stand before or after a step that begins "
        "before the last",
        "They are left out, the longest stretch is kept; look at the host's clock",
    )
    NO_CACHE_SIZE = (
        "records without |cache|: the scheduler has no block pool, or an older "
        "recorder wrote them",
        f"Read what is there. {RECORD}",
    )
    NO_STEPS = (
        "no engine step has ended",
        "Send the server a request; it records a step for each",
    )
    # Servers side by side.
    COPY = "a copy of {of}: both are the life {life}", "It is left out; remove it"
    SEVERAL_RELEASES = (
        "the instances run different vLLM releases: {releases}",
        "Compare instances of one release",
    )
    OTHER_HOSTS = (
        "{names} ran on other hosts: moments are aligned by the wall clocks, and are "
        "off by as much as these differ",
        "Keep the hosts' clocks in step",
    )
    UNKNOWN_CLOCK = (
        "{names} do not say which clock is theirs: their moments are taken as those of "
        "one host",
        f"{RECORD}. Older recorders did not name the clock",
    )
    # Requests of engines and of their clients.
    SAMPLED = (
        "one step in {every} was recorded: waits of single requests are unknown",
        "Record every step to see it: unset KVTAX_STEP_RECORDS_EVERY",
    )
    REQUESTS_UNREADABLE = "{error}", "The requests are left out; see the file"
    UNENDED_REQUESTS = (
        "{count:,} requests had not ended when the engine stopped",
        "They are left out of the table of requests",
    )
    IMPOSSIBLE_REQUESTS = (
        "{count:,} requests ended before they began, or have counts below zero",
        LOOK_AT_CLOCK,
    )
    UNPLACED_REQUESTS = (
        "{count:,} requests name steps that are not recorded",
        "They are left out; steps are missing",
    )
    # Trials of a sweep.
    TRIAL_FAILED = (
        "failed: {error}",
        "Read the trial's server.log; kvtax sweep --resume runs it again",
    )
    TRIALS_FAILED = (
        "some trials failed and are left out: {error}",
        "Read their server.log and driver.log; a sweep with `--out` and `--resume` "
        "makes only them again.",
    )
    FEW_STEPS = (
        "{count} decode-only steps at the stated |cache| (fewer than {fewest})",
        "Hold the levels for longer (`output_tokens` of the ladder).",
    )
    NO_SLOPE = "too few holds to know a level", "Add passes to the ladder."
    UNDECIDED = (
        "no verdict: {metrics} may grow by more than the margin",
        f"Run it with more repeats (`--only`, `--repeats`), or {QUIETER}.",
    )
    NO_WORKER_RECORDS = (
        "{missing} of {steps} steps lack worker records",
        "Look in server.log for a worker that died: the overhead of these steps is "
        "not known.",
    )
    TORN_TRIAL = (
        "{count} torn last lines were dropped",
        "Look in server.log and driver.log for what killed the writer.",
    )
    REQUESTS_LOST = (
        "{count} of {scheduled} requests {how}",
        "Read the errors in requests.jsonl: the server had less load than planned.",
    )
    NOT_RECONCILED = (
        "requests do not reconcile",
        "Make the trial again: requests have no outcome, or two.",
    )
    SENT_LATE = (
        "the driver sent late: lag p99 {p99} ms, budget {budget} ms",
        "Growth and latencies of that trial are left out, not its levels. Lower the "
        f"rate of the load (`rate_rps`), or {QUIETER}.",
    )
    # A sweep as a whole.
    UNCOMMITTED = (
        "the run was made from a tree with uncommitted changes",
        "Commit and run again: the measured code is not on record.",
    )
    NO_NOISE_FLOOR = (
        "no A/A pair: differences have no noise floor",
        "Run the config with the role `baseline` and the one with the role `twin` too.",
    )
    EQUALS_DIFFER = (
        "{pair} are the same thing, and differ by {apart:+.1f} % of own work: configs "
        "of this run are not compared",
        f"Make the run again; {QUIETER}.",
    )
    REFUSED = (
        "{count} of {servers} servers shared their cores and are left out: nothing is "
        "judged",
        f"{QUIETER.capitalize()}.",
    )
    ROLE_TWICE = (
        "{names} have the role {role}: the first counts",
        "Leave the role to one config of the run.",
    )

    def __call__(self, place: str = "", **facts: Any) -> RunWarning:
        """Make a warning of this kind about `place`."""
        text, remedy = (part.format(**facts) for part in self.value)
        return RunWarning(self.name.lower(), place, text, remedy)


def left_out(name: str, torn_lines: int, bad: Sequence[str]) -> list[RunWarning]:
    """Warn of lines and parts of a file that are left out."""
    warnings = []
    if torn_lines:
        lines = f"{torn_lines} torn last line{'s'[: torn_lines > 1]}"
        warnings.append(Warn.TORN_LINES(name, lines=lines))
    if bad:
        first, *others = bad
        more = f", and {len(others):,} more like it" if others else ""
        warnings.append(Warn.BAD_LINES(name, first=first, more=more))
    return warnings
