# SPDX-License-Identifier: Apache-2.0
"""experiment.json and arm.json: the runs of an experiment, planned and as they went."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from kvtax.records.run import Role

from kvtax_fleet.records.instances import Instance

OUR_PROXY: Final = "fleet.proxy"


class TraceFacts(msgspec.Struct, frozen=True):
    """The trace that was replayed, and its counts."""

    file: str
    """Its name in the experiment's folder."""
    sha256: str
    """Of the file: equal traces are equal files."""
    source: str
    """The trace that it was cut out of."""
    sessions: int
    """Sessions, sub-agents among them."""
    requests: int
    """Requests of all sessions."""
    input_tokens: int
    """Prompt tokens of all requests."""
    output_tokens: int
    """Generated tokens that all requests ask for."""


class Freshness(msgspec.Struct):
    """Evidence that the caches were cold."""

    instances: dict[str, dict[str, float]] = {}
    """By instance, what it had counted before the first request, by metric."""
    first_step_cached_blocks: dict[str, int] = {}
    """By instance, cached blocks in its first engine step besides the step's own."""
    gpu_used_mib: list[int] | None = None
    """Memory in use before the start, on each GPU that instances were started on; null
    without a GPU."""
    survivors: list[int] | None = None
    """Processes of earlier runs that were there before the start; null where instances
    are not started here."""
    fresh: bool = False
    """Whether all of this shows that the caches were cold."""
    why: str | None = "not looked at"
    """Why not; null if they were."""


class EngineLag(msgspec.Struct, frozen=True):
    """Sums over the steps of one instance that ran a forward."""

    steps: int
    """Number of those steps."""
    step_s: float
    """Their total time."""
    simulated_s: float
    """Total time that their forwards were meant to take."""
    slept_s: float
    """Total time that their forwards took."""


class MachineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the machine: evidence that it kept up with what it simulates."""

    cores: int | None = None
    """Cores of the machine."""
    busy_mean: float | None = None
    """Share of all cores that was busy."""
    engines: dict[str, EngineLag] = {}
    """What their steps took, by instance."""
    engine_late: float | None = None
    """How much longer the forwards took than simulated, as a share of the simulated."""
    engine_excess: float | None = None
    """How much longer the steps took than the simulated forward, as a share of it."""
    saturated: str | None = None
    """Why the run is not valid; null if the machine kept up."""


class PlannedArm(msgspec.Struct, kw_only=True):
    """One run of an experiment, as planned."""

    experiment: str | None = None
    """Name of the experiment."""
    arm: str
    """Name and concurrency: `linear@8`."""
    repeat: int
    """Counts from 0."""
    router: str = OUR_PROXY
    """What stood between the replayer and the instances: `fleet.proxy`."""
    policy: str | None = None
    """The router's, as in the experiment's file."""
    parameters: dict[str, Any] = {}
    """Of the policy, as in the experiment's file."""
    connector: str | None = None
    """Connector config of the instances."""
    report: Role | None = None
    """The `[report]` table of the connector's config; null for instances that were not
    started here."""
    cache_state: str | None = None
    """`mirror` or `exact`: how the proxy knows what is cached."""
    concurrency: int | None = None
    """Requests in flight per instance; with `open_loop` at most."""
    baseline: str | None = None
    """The arm that this one is compared with."""
    same_as: str | None = None
    """The arm that this one repeats (A/A): the baseline, else the first in the file."""
    open_loop: bool | None = None
    """Whether sessions begin when the trace says."""
    time_scale: float | None = None
    """How much faster than the trace: divides arrival and think times."""
    time_factor: float | None = None
    """Factor on the simulated forward."""
    virtual: bool = False
    """Whether time itself was simulated, too; then all `_s` and `_ns` of the run are by
    that clock, and no machine had to keep up."""
    trace: TraceFacts | None = None
    """What was replayed."""
    profile: dict[str, Any] | None = None
    """Settings of the instances, `forward` times `time_factor` among them; null for
    instances that were not started here."""
    versions: dict[str, Any] = {}
    """As `provenance` in `run.json`."""


class ArmRecord(PlannedArm, kw_only=True, tag_field="schema", tag="kvtax.arm/1"):
    """One run of an experiment, as it went; written when it has ended."""

    status: Literal["ok", "failed"]
    """Whether the run came to its end."""
    error: str | None = None
    """Why it did not."""
    instances: list[Instance] = []
    """The instances that it ran on."""
    patches: dict[str, str] = {}
    """SHA-256 by name of the patches in the instances' vLLM."""
    freshness: Freshness | None = None
    """Whether the caches were cold."""
    machine: MachineLoad | None = None
    """Whether the machine kept up."""
    started_utc: str | None = None
    """When the run started."""
    ready_s: float | None = None
    """Until all instances answered."""
    replay_s: float | None = None
    """From the start of the replay to its end."""
    wall_s: float | None = None
    """From the start of the run to its end."""
    pss_mib: dict[str, float] = {}
    """Memory after the replay, the PSS of all processes, by instance."""


class ExperimentRecord(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.experiment/1"
):
    """Plan of an experiment; written before its first run."""

    experiment: dict[str, Any]
    """The experiment's file as resolved."""
    trace: TraceFacts
    """What all runs replay."""
    plan: list[str]
    """The runs' folders, in the order in which they run."""
    versions: dict[str, Any]
    """As `provenance` in `run.json`."""
