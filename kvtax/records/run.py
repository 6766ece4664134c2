# SPDX-License-Identifier: Apache-2.0
"""run.json, trial.json and reads.jsonl: a sweep as planned, and each of its trials.

The sweep copies the `[report]` table of each config's TOML into run.json (`Role`), so
that a report needs only the files of its run. A config without the table is measured
and reported like any other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvtax.records.estimate import Estimate
from kvtax.records.profile import ProfileRecord


class Provenance(msgspec.Struct, kw_only=True):
    """Machine, software and code: everything that may change a result."""

    vllm_version: str | None
    """The version of vLLM that is installed."""
    python_version: str
    """The version of Python."""
    package_versions: dict[str, str]
    """Versions of the packages that matter, by name."""
    patch_hashes: dict[str, str]
    """SHA-256 by name of the patches that were applied."""
    host: str
    """Name of the machine."""
    cpu_model: str | None
    """Model of its CPU."""
    cpu_count: int | None
    """Logical cores of the machine."""
    cpu_affinity: list[int]
    """Cores that this process may run on."""
    cpu_governor: str | None
    """Frequency governor of the first core; null where the kernel names none."""
    load_average: list[float]
    """Load over 1, 5 and 15 minutes before the run."""
    hash_seed: str | None
    """`PYTHONHASHSEED` of this process; null if it is not set."""
    cgroup_limits: dict[str, str]
    """Limits on CPU and memory of this process's control group."""
    gpu_model: str | None
    """Model of the GPUs; null without any."""
    kernel: str
    """Release of the kernel."""
    date_utc: str
    """When this was noted."""
    git_commit: str | None
    """Commit of this repository; null outside of git."""
    git_dirty: bool | None
    """Whether there were uncommitted changes."""
    command_line: str
    """The command that was run; `***` stands for values that may be private."""


Verdict = Literal["grows", "stalls", "drifts", "flat", "inconclusive", "failed"]
RoleName = Literal["baseline", "twin", "floor", "hypothesis"]


class AimOfConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most that one number of a config is meant to be."""

    quantity: Literal["times_floor", "slope_us_per_1k_blocks"]
    """The p50 of `metric` over that of the floor, or what it grows by."""
    metric: Literal["schedule", "overhead", "step"]
    """Which of the times that have a verdict."""
    at_most: float
    """The bound, which is within the aim."""
    whose: str = "ours"
    """Who set the aim."""


class ReferenceFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of the reference study for the same thing; null: not in it."""

    schedule_slope_us_per_1k_blocks: float
    """Growth of the time in `schedule()`."""
    schedule_p50_us: float
    """Time in `schedule()`."""
    build_meta_p50_us: float | None = None
    """Time in `build_connector_meta`."""
    get_finished_us: tuple[float, float, float] | None = None
    """p50, p90 and p99 of the time in `get_finished`."""


class Role(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `[report]` table of a config."""

    role: RoleName | None = None
    """`baseline`: the others are compared with it. `twin`: the baseline once more, to
    show the noise. `floor`: a connector that does nothing; ratios to it leave out the
    framework's own cost. `hypothesis`: its cost is claimed to be linear in |cache|."""
    label: str | None = None
    """What prose calls the config; null: by its name."""
    colour: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Place of its line in the palette of all pictures; null: the first free one."""
    before_after: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Place in the figure and the table before and after the fixes, lowest first;
    null: not in them."""
    layer: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Place in the fleet's report of what each connector adds to the one before,
    lowest first; null: not in it."""
    aims: list[AimOfConfig] = []
    """What the config is meant to cost."""
    expected: Verdict | None = None
    """The verdict that the config must get, where its true cost is known; null: it is
    not. A sweep in which a config gets another one ends with exit status 1."""
    reference: ReferenceFigures | None = None
    """Shown beside what a run measured."""


PLAN_FILE = "run.json"


class PlanEntry(msgspec.Struct):
    """One trial of the plan."""

    config: str
    """Name of the connector config."""
    repeat: int
    """Counts from 0."""


class PairedCost(msgspec.Struct, frozen=True):
    """One part of a step: CPU of the engine's thread with a config and a baseline."""

    part: str
    """The part."""
    baseline_us: float
    """Median with the baseline."""
    more_us: Estimate
    """Mean of what it takes more with the config."""
    ratio: Estimate
    """Time with the config over that with the baseline, medians of chunks of steps. The
    interval comes from resampling processes, and quartets of chunks within them."""


class Pairs(msgspec.Struct, frozen=True):
    """Cost of a config over a baseline, by pairs inside one process."""

    config: str
    """The config."""
    baseline: str
    """The config that it is compared with."""
    processes: int
    """How many processes were measured."""
    quartets: int
    """Chunks of steps in the order A B B A, over all processes."""
    costs: list[PairedCost]
    """Costs by part of a step."""


class HostRecord(msgspec.Struct):
    """Share of one host of several."""

    host: str
    """Its address."""
    repeats: list[int]
    """The rounds that it measured, each of them whole."""
    provenance: dict[str, Any]
    """The host: as `provenance` of run.json, at its first round."""


class RunRecord(msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.run/1"):
    """Plan of a sweep; written before its first trial."""

    profile: ProfileRecord
    """The profile as resolved."""
    provenance: dict[str, Any] = {}
    """Where and with what the run was made: the table below."""
    configs: dict[str, Role] = {}
    """The `[report]` table of each config's TOML (`kvtax/records/run.py`)."""
    plan: list[PlanEntry] = []
    """The trials in the order in which they run. A planned trial without a `trial.json`
    counts as failed."""
    hosts: list[HostRecord] | None = None
    """Which host measured what; null if all was measured on the machine of
    `provenance`."""
    pairs: list[Pairs] = []
    """Costs of the profile's `pairs`; empty until the trials have ended."""


class ReadCounts(msgspec.Struct):
    """Counts of a peer's reads in one trial."""

    reads: int
    """Turns in which the peer found something."""
    blocks_offered: int
    """Blocks that the server offered."""
    blocks_valid: int
    """Offered blocks that were still valid when they had arrived."""
    seconds: float
    """From the first turn to the last."""


class IdleCost(msgspec.Struct):
    """Cost of a server that has nothing to do."""

    seconds: float
    """For so long nothing was sent to it."""
    cpu_s: float
    """CPU time of all its processes."""
    steps: int
    """Steps of its engine."""


class MachineLoad(msgspec.Struct, frozen=True):
    """Load of the machine while requests were sent."""

    cores: int
    """Logical cores."""
    seconds: float
    """For so long."""
    steal_share: float
    """Share of the time of all cores that the hypervisor gave to other machines."""
    others_cores: float
    """CPU time per second of processes that are not this run's."""


class TrialRecord(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.trial/1"
):
    """Outcome of one trial; written when it has ended."""

    config: str
    """Name of the connector config."""
    repeat: int
    """Counts from 0."""
    status: Literal["ok", "failed"]
    """Whether the trial is a valid measurement."""
    error: str | None = None
    """Why it failed."""
    connector_config: dict[str, Any] | None = None
    """vLLM's `kv_transfer_config`, secrets as `***`; null without a connector."""
    patches: dict[str, str] = {}
    """SHA-256 by name of the patches in this trial's vLLM."""
    num_blocks: int
    """KV cache blocks."""
    block_size: int
    """Tokens per block."""
    started_utc: str | None = None
    """When the trial started; null if it never did."""
    ready_s: float | None = None
    """Until the server answered."""
    cold_start: str | None = None
    """Why the server was not forked from a process that has imported all but vLLM, and
    so started slowly; null if it was."""
    wall_s: float | None = None
    """From the start of the trial to its end."""
    pss_mib: float | None = None
    """Memory of the server after its load: the PSS of all its processes."""
    reads: ReadCounts | None = None
    """What a peer read meanwhile; null without one."""
    idle: IdleCost | None = None
    """What the server took once all was answered, and the peer gone; of a config's
    first server."""
    machine: MachineLoad | None = None
    """What else the machine did meanwhile."""


class ReadsHeader(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.reads/1"
):
    """Header; written by the peer before its first turn."""

    clock: str = "CLOCK_MONOTONIC"
    """The clock of `t_ns`."""
    reads_per_s: float | None = None
    """Turns per second, at most."""


class ReadRecord(msgspec.Struct, kw_only=True):
    """One turn of the peer."""

    t_ns: int
    """When the turn began."""
    offered: int
    """Blocks that the server offered."""
    valid: int
    """Blocks that were still valid when they had arrived."""
