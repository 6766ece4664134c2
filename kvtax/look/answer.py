# SPDX-License-Identifier: Apache-2.0
"""The answer for one instance: a sentence, who waits, and what to do about it here."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtax.look.instance_summary import COVARIATES, Cost, Felt, InstanceSummary
from kvtax.stats import Estimate

KNOWN_COSTS = Path(__file__).parent / "known_costs.toml"
# Share of the time that users wait, from which on they feel the connector.
FELT_SHARE = 0.02
# Patches that record, or make a connector run without its hardware: no cost, no fix.
NOT_SHOWN = re.compile(r"step_timing_v2$|cpu_|.*_cpu_layout$|hf3fs_metadata_url$")
SPANS = {
    "ttft": "of the time to the first token (TTFT)",
    "tpot": "of the time per output token (TPOT)",
}


class KnownCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `[[cost]]` of known_costs.toml, which describes the fields."""

    connectors: list[str]
    methods: list[str]
    at_least_us: float
    words: str
    patch: str
    releases: str = ""
    needs: str = ""
    moves_with: str | None = None

    def shows(self, summary: InstanceSummary) -> Iterator[tuple[str, float]]:
        """Yield the methods that have the cost, with its us."""
        for column in summary.instance.methods:
            name = column.removesuffix("_us")
            if self._is_at(name) and (us := self._us(summary, column)) is not None:
                yield name, us

    def _is_at(self, name: str) -> bool:
        side, *inside, method = name.split(".")
        if f"{side}.{method}" not in self.methods:
            return False
        # A connector inside of another: worker.MooncakeConnector[0].get_finished.
        return not (inside and self.connectors) or inside[-1].startswith(
            tuple(self.connectors)
        )

    def _us(self, summary: InstanceSummary, column: str) -> float | None:
        """Return the us if they reach `at_least_us`."""
        if self.moves_with is None:
            methods = summary.cost.methods if summary.cost else []
            means_us = {part.column: part.mean_us for part in methods}
            us = means_us.get(column, 0.0)
            return us if us >= self.at_least_us else None
        slope = summary.slopes.get(column, {}).get(self.moves_with)
        if isinstance(slope, Estimate) and slope.low >= self.at_least_us:
            return slope.value
        return None


class BusyThread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `[[thread]]` of known_costs.toml; `connectors` is how their classes begin."""

    connectors: str
    patches: list[str]
    words: str


class AddedCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An `[[added]]` of known_costs.toml: a patch that adds a cost in `methods`.

    The patch `ended_by` takes the cost away again.
    """

    patch: str
    words: str
    methods: list[str]
    ended_by: str


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document known_costs.toml."""

    cost: list[KnownCost]
    thread: list[BusyThread]
    added: list[AddedCost]


@functools.cache
def known() -> Known:
    """Read known_costs.toml."""
    return msgspec.toml.decode(KNOWN_COSTS.read_bytes(), type=Known)


def patches_of(summary: InstanceSummary) -> list[str]:
    """Name the patches of the server that may change a cost."""
    label = summary.instance.header.label.get("patches", {})
    names = label if isinstance(label, dict | list | tuple) else ()
    return [str(name) for name in names if not NOT_SHOWN.match(str(name))]


def added_cost(summary: InstanceSummary) -> AddedCost | None:
    """Return the patch of the server that adds a cost, if there is one."""
    patches = patches_of(summary)
    return next((added for added in known().added if added.patch in patches), None)


def answer(summary: InstanceSummary) -> list[str]:
    """Say what the connector costs, what that moves with, who feels it, what to do."""
    if summary.cost is None:
        return []
    words = [_sentence(summary, summary.cost), *_long_steps(summary)]
    return [" ".join(words), *(f"- {remedy}" for remedy in remedies(summary))]


def remedies(summary: InstanceSummary) -> list[str]:
    """Name each known cost that shows, and what ends it on this server."""
    shown: dict[str, str] = {}
    for cost in known().cost:
        if not _may_be(cost, summary):
            continue
        for name, us in cost.shows(summary):
            shown.setdefault(name, _remedy(cost, name, us, summary))
    return [*shown.values(), *_of_threads(summary)]


def _may_be(cost: KnownCost, summary: InstanceSummary) -> bool:
    """Return whether the server has, or may have, a connector with the cost."""
    connectors = set(summary.instance.header.connectors)
    if connectors or not cost.connectors:
        return not cost.connectors or not connectors.isdisjoint(cost.connectors)
    # A release before the cost was there cannot have it.
    own = _numbers(summary.instance.vllm_version or "")
    return not own or own >= _numbers(cost.releases.split()[0])


def _remedy(cost: KnownCost, name: str, us: float, summary: InstanceSummary) -> str:
    per = f" per {COVARIATES[cost.moves_with].unit}" if cost.moves_with else ""
    added = added_cost(summary)
    is_added = added is not None and name in added.methods
    words = added.words if added and is_added else cost.words
    subject = f"`{added.patch}` in `{name}`" if added and is_added else f"`{name}`"
    text = f"{subject} ({us:,.0f} µs{per}) {words}"
    if cost.connectors and not summary.instance.header.connectors:
        text += f", if it is {cost.connectors[0]}'s"
    return f"{text}. {_what_to_do(cost, summary)}"


def _what_to_do(cost: KnownCost, summary: InstanceSummary) -> str:
    if cost.patch in patches_of(summary):
        return f"The patch `{cost.patch}` is applied already: this is what remains."
    command = f"`kvtax run --fix {cost.patch} -- vllm serve ...`"
    releases = _releases(cost.releases, summary.instance.vllm_version)
    words = f"Remedy: {command}{cost.needs and ' '}{cost.needs}, {releases}."
    if summary.cost and summary.cost.overlaps and cost.moves_with is None:
        words += (
            " Steps overlap here (asynchronous scheduling): what a worker waits for "
            "beside the model is hidden, so users may not notice the remedy."
        )
    return words


def _releases(tested: str, version: str | None) -> str:
    """Say how the server's release relates to the `tested` ones, "A to B"."""
    oldest, newest = (_numbers(release) for release in tested.split(" to "))
    own = _numbers(version or "")
    if own and own > newest:
        return (
            f"tested on vLLM {tested}; yours, {version}, is newer, so try it with "
            "--check first"
        )
    if own and own < oldest:
        return f"for vLLM {tested}; yours, {version}, is older and cannot have it"
    return f"tested on vLLM {tested}"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _of_threads(summary: InstanceSummary) -> Iterator[str]:
    """Name the threads that keep a core busy, each with its patch where it has one."""
    connectors = summary.instance.header.connectors
    patches = patches_of(summary)
    for thread in summary.instance.threads:
        words = f"Thread `{thread.name}` keeps a core busy ({thread.cores:.2f} of one)"
        for busy in known().thread:
            if not any(name.startswith(busy.connectors) for name in connectors):
                continue
            if not set(busy.patches) & set(patches):
                fixes = " ".join(f"--fix {patch}" for patch in busy.patches)
                words += (
                    f": {busy.words}. Remedy: `kvtax run {fixes} -- vllm serve ...`"
                )
        yield f"{words}."


def _sentence(summary: InstanceSummary, cost: Cost) -> str:
    step = f"a step of {cost.step.mean_us:,.0f} µs"
    if cost.step.p50_us:
        step += f" (median {cost.step.p50_us:,.0f})"
    overlap = f" ({cost.overlap})" if cost.overlap else ""
    name = _name(summary)
    if cost.connector is None:
        return f"The cost of {name} in {step}{overlap} is unknown."
    is_part = not cost.has_worker
    least = "at least " if is_part else ""
    words = (
        f"{name[0].upper()}{name[1:]} adds {least}{cost.connector.mean_us:,.1f} µs "
        f"to {step}{overlap}, {least}{cost.connector.share:.1%} of the time"
    )
    if is_part:
        words += "; only the scheduler's side was recorded"
    elif cost.worker_steps < 0.99 * cost.steps:
        words += (
            f"; {cost.worker_steps:,} of {cost.steps:,} steps have a worker's record"
        )
    if cost.methods and cost.methods[0].mean_us > 0:
        most = cost.methods[0]
        words += (
            f". Most of it is {most.name}, {most.mean_us:,.1f} µs "
            f"(median {most.p50_us:,.1f})"
        )
        added = added_cost(summary)
        is_added = added is not None and most.name in added.methods
        if added and is_added and added.ended_by not in patches_of(summary):
            words += f": `{added.patch}` {added.words}"
    moved = [
        f"{slope:+,.1f} µs per {COVARIATES[axis].unit}"
        for axis, slope in summary.slopes.get("connector_us", {}).items()
        if isinstance(slope, Estimate) and slope.low > 0
    ]
    words += f". It moved with: {'; '.join(moved)}" if moved else ""
    return f"{words}. {_felt(summary, cost)}".rstrip()


def _name(summary: InstanceSummary) -> str:
    """Name the connector; one whose cost a patch adds is not the upstream class."""
    connectors = summary.instance.header.connectors
    release = summary.instance.vllm_version
    patches = patches_of(summary)
    listed = ", ".join(f"`{name}`" for name in patches)
    kind = "patch" if len(patches) == 1 else "patches"
    if added_cost(summary):
        return f"a connector with kvtax's {kind} {listed}"
    name = connectors[0] if connectors else "the connector"
    if release and connectors:
        name += f" of vLLM {release}"
    return f"{name} with the {kind} {listed}" if patches else name


def _felt(summary: InstanceSummary, cost: Cost) -> str:
    """Say how much of what users wait for is the connector's."""
    if not summary.felt:
        return ""
    shares = [f"{_percent(felt)} {SPANS[span]}" for span, felt in summary.felt.items()]
    known = max(felt.requests for felt in summary.felt.values())
    of = summary.instance.requests.height
    words = f"{_verdict(summary, cost)}: {' and '.join(shares)}"
    if known < 0.99 * of:
        words += f", of the {known:,} of {of:,} requests whose steps are known"
    return f"{words}."


def _verdict(summary: InstanceSummary, cost: Cost) -> str:
    most = max((felt.share for felt in summary.felt.values()), key=lambda s: s.value)
    if most.value < FELT_SHARE:
        return "Users hardly feel it"
    if cost.overlaps:
        return "Users may feel it, as far as it is not hidden by the model's time"
    is_certain = most.ci95 is not None and most.low >= FELT_SHARE
    return "Users feel it" if is_certain else "Users may feel it"


def _percent(felt: Felt) -> str:
    share = felt.share
    interval = f" [{share.low:.2%}, {share.high:.2%}]" if share.ci95 else ""
    return f"{share.value:.2%}{interval} (median {felt.p50:.2%}, p99 {felt.p99:.2%})"


def _long_steps(summary: InstanceSummary) -> Iterator[str]:
    """Name the steps that are in no mean."""
    digest = summary.instance.digest
    if not digest.long_steps:
        return
    longest = digest.longest[0]
    at_s = (longest.t_ns - digest.begin_ns) / 1e9
    plural = "s" if digest.long_steps > 1 else ""
    yield (
        f"{digest.long_steps:,} step{plural} took over 100 times the median, "
        f"{digest.long_us / 1e6:,.1f} s in all, as a compilation does, and "
        f"{'are' if plural else 'is'} in no mean; the longest is step "
        f"{longest.step_id}, {longest.us / 1e6:,.1f} s, {at_s:,.0f} s after the first."
    )
