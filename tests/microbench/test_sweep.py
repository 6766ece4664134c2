# SPDX-License-Identifier: Apache-2.0
"""What a sweep refuses, what one bad config does not spoil, and when it goes on."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections import Counter, defaultdict
from itertools import groupby, islice, takewhile
from pathlib import Path

import msgspec
import pytest

from connectors.direct_read.peer import reads
from kvtax import patcher
from kvtax.cli import Exit, main
from kvtax.config import ConfigError
from kvtax.engine.connector import Connector, connector_names, load_connector
from kvtax.engine.installation import installation
from kvtax.engine.null_model import Checkpoint
from kvtax.engine.overlay import build_overlay
from kvtax.load.plan import PlanError, PlannedPhase, bodies, read_plan
from kvtax.patcher.at_import import SOURCES
from kvtax.paths import CONFIGS, PATCHES
from kvtax.proc import machine_lock as machine_lock_module
from kvtax.proc.machine_lock import machine_lock
from kvtax.proc.ports import reserve
from kvtax.records.files import LineFile
from kvtax.records.requests import EVENT_REQUESTS, Phase, Place, place_of
from kvtax.records.run import ReadCounts, ReadRecord, TrialRecord
from kvtax.records.steps import EngineHeader, EngineStep
from microbench.peer import PeerError, count_reads, peer
from microbench.profile import (
    FILL_TOKENS,
    LONG_TOKENS,
    Profile,
    load_profile,
)
from microbench.specs import build_overlays, round_of
from microbench.sweep import configs_of_next_round, outcome_line, wanting
from microbench.trial import TrialError, TrialSpec, _check_fresh, run_trial
from tests.microbench.synthetic import Truth, write_run, write_trial

PROFILES = sorted(file.stem for file in (CONFIGS / "profiles").glob("*.toml"))
CONNECTORS = [name for name in connector_names() if "/" not in name]


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_names_configs_that_exist(name):
    for config in load_profile(name).configs:
        load_connector(config)


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_fills_its_cache_within_one_lifetime(name):
    profile = load_profile(name)
    plan = profile.plan("model", vocab_size=1000, repeat=0, grows=True)
    tokens = plan.prompt_tokens + plan.output_tokens - 1
    growth = plan.phases[0].requests * (tokens // profile.block_size)
    assert growth >= profile.num_blocks
    assert tokens < profile.max_model_len


def hold_phases(profile: Profile, repeat: int = 0) -> list[list[PlannedPhase]]:
    """Group the phases of each hold: what fills the cache, the decoders, the hold."""
    phases = profile.plan("model", 1000, repeat, grows=repeat == 0).phases
    kinds = Phase.FILL, Phase.HOLD
    of_holds = (phase for phase in phases if Phase.of(phase.name) in kinds)
    grouped = groupby(of_holds, lambda phase: place_of(phase.name).number)
    return [list(of_hold) for _, of_hold in grouped]


def passes_of(profile: Profile, repeat: int = 0) -> list[list[Place]]:
    """List the holds of each pass."""
    places = [place_of(phases[-1].name) for phases in hold_phases(profile, repeat)]
    count = profile.load.ladder.passes
    assert len(places) % count == 0
    each = len(places) // count
    return [places[n : n + each] for n in range(0, len(places), each)]


@pytest.mark.parametrize("name", PROFILES)
def test_every_hold_begins_with_the_cache_filled_to_its_level(name):
    profile = load_profile(name)
    ladder, plan = profile.load.ladder, profile.plan("model", 1000, 0, grows=True)
    one_request = FILL_TOKENS // profile.block_size
    blocks = math.inf
    of_events = Counter(place_of(p.name) for p in plan.phases if p.name[:4] == "long")
    for phases in hold_phases(profile):
        *_, decoders, hold = phases
        level, count = place_of(hold.name)[1:]
        if phases[0].reset_prefix_cache:
            blocks = 0
        filled = blocks
        for phase in phases:
            prompt, answer = plan.shape(phase)
            # The last token of an answer is never computed.
            more = phase.requests * ((prompt + answer - 1) // profile.block_size)
            blocks += more
            if phase not in (decoders, hold):
                filled = blocks
        long_blocks = EVENT_REQUESTS[Phase.LONG] * LONG_TOKENS // profile.block_size
        blocks += of_events[place_of(hold.name)] * long_blocks
        # What arrives leaves no block, so the level holds.
        assert more == 0
        assert decoders.requests == count
        # The lowest level has a prompt, for a peer to read.
        target = max(ladder.levels[level] * profile.num_blocks, one_request)
        if level == len(ladder.levels) - 1:
            assert filled >= target
        elif not ladder.levels[level] and count == ladder.decoders:
            assert filled == target
        else:
            assert abs(filled - target) <= one_request


@pytest.mark.parametrize("name", PROFILES)
def test_a_pass_has_every_level_in_random_order_one_of_them_twice(name):
    profile = load_profile(name)
    ladder = profile.load.ladder
    passes = passes_of(profile)
    assert len(passes) == ladder.passes
    orders = []
    for places in passes:
        few = [place.level for place in places if place.decoders == ladder.decoders]
        many = [place.level for place in places if place.decoders != ladder.decoders]
        assert set(few) == set(range(len(ladder.levels)))
        assert len(few) == len(ladder.levels) + 1
        both = [0, ladder.stated_level] if ladder.many_decoders else []
        assert sorted(many) == both
        orders.append(few)
    assert len(set(map(tuple, orders))) == len(passes)


@pytest.mark.parametrize("name", PROFILES)
def test_levels_are_told_from_the_time_since_the_reset(name):
    # Requests since the reset stand for time.
    profile = load_profile(name)
    ladder = profile.load.ladder
    since, ages = 0, defaultdict(set)
    for phases in hold_phases(profile):
        since = 0 if phases[0].reset_prefix_cache else since
        since += sum(phase.requests for phase in phases)
        place = place_of(phases[-1].name)
        ages[place.level, place.decoders].add(since)
    few = [len(of) for (_, count), of in ages.items() if count == ladder.decoders]
    many = [len(of) for (_, count), of in ages.items() if count != ladder.decoders]
    assert sum(count > 1 for count in few) >= 3
    assert all(count > 1 for count in many)


@pytest.mark.parametrize("name", PROFILES)
def test_a_lower_level_follows_a_reset_and_only_holds_do_not_wait(name):
    before = math.inf
    for phases in hold_phases(load_profile(name)):
        first, *others = phases
        level = place_of(first.name).level
        if level < before:
            assert first.reset_prefix_cache
        assert not any(phase.reset_prefix_cache for phase in others)
        for phase in phases:
            assert phase.after_answers == (Phase.of(phase.name) is Phase.FILL)
        before = level


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("repeat", [0, 1])
def test_passes_have_a_hit_a_long_prompt_and_a_request_after_idleness(name, repeat):
    profile = load_profile(name)
    ladder = profile.load.ladder
    full = len(ladder.levels) - 1
    phases = profile.plan("model", 1000, repeat, grows=False).phases
    levels = defaultdict(list)
    for before, phase in itertools.pairwise(phases):
        kind, place = Phase.of(phase.name), place_of(phase.name)
        if kind in (Phase.FILL, Phase.HOLD):
            continue
        levels[kind].append(place.level)
        assert place == place_of(before.name) and phase.after_answers
        if kind is Phase.AFTER_IDLE:
            assert Phase.of(before.name) is Phase.HOLD and phase.pause_s == 1.0
        elif kind is Phase.HIT:
            fills = [p for p in phases if p.name == phase.repeats_prompt]
            (fill,) = fills
            assert fill.prompt_tokens == phase.prompt_tokens
            # Not reset since, so it is still cached.
            since = phases[phases.index(fill) + 1 : phases.index(phase)]
            assert not any(later.reset_prefix_cache for later in since)
    # Each pass has all three, at the lowest and at the highest level in turn.
    assert set(levels) == {Phase.AFTER_IDLE, Phase.HIT, Phase.LONG}
    turns = [full if number % 2 else 0 for number in range(ladder.passes)]
    assert all(of_kind == turns for of_kind in levels.values())


@pytest.mark.slow
def test_a_prompt_that_is_to_hit_is_the_one_that_filled_the_cache():
    plan = load_profile("cpu").plan("model", 1000, 0, grows=False)
    sent = [msgspec.json.decode(body)["prompt"] for body in bodies(plan)]
    by_phase = defaultdict(list)
    for phase in plan.phases:
        of_phase, sent = sent[: phase.requests], sent[phase.requests :]
        by_phase[phase.name] += of_phase
    for phase in plan.phases:
        if phase.repeats_prompt:
            last = by_phase[phase.repeats_prompt][-1]
            assert all(prompt == last for prompt in by_phase[phase.name])


def test_a_plan_repeats_only_the_prompt_of_an_earlier_phase(tmp_path):
    plan = load_profile("cpu").plan("model", 1000, 0, grows=False)
    hit = next(phase for phase in plan.phases if phase.repeats_prompt)
    wrong = msgspec.structs.replace(plan, phases=[hit, *plan.phases[:3]])
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(wrong))
    with pytest.raises(PlanError, match=f"{hit.name} repeats a prompt of fill"):
        read_plan(tmp_path / "plan.json")


def test_growth_is_measured_where_the_reference_study_has_figures():
    growing = load_profile("cpu").growing()
    hypothesis = "mooncake_both_hash_sync"
    expected = {"plain", "noop", hypothesis}
    assert growing == expected


@pytest.mark.parametrize("name", PROFILES)
def test_a_further_server_has_another_order(name):
    profile = load_profile(name)
    first = profile.plan("model", 1000, repeat=0, grows=True)
    further = profile.plan("model", 1000, repeat=profile.repeats, grows=False)
    assert [phase.name for phase in first.phases[:2]] == ["growth", "plateau"]
    assert Phase.of(further.phases[0].name) is Phase.FILL
    holds = passes_of(profile, profile.repeats)
    assert holds != passes_of(profile)
    assert further.seed != first.seed


@pytest.mark.parametrize("name", PROFILES)
def test_a_plan_can_be_read_and_its_levels_rise(name, tmp_path):
    profile = load_profile(name)
    path = tmp_path / "plan.json"
    plan = profile.plan("model", 1000, repeat=0, grows=True)
    path.write_bytes(msgspec.json.encode(plan))
    assert read_plan(path) == plan
    levels = profile.load.ladder.levels
    assert levels == sorted(set(levels)) and levels[-1] == 1.0


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_full_profiles_reach_the_reference_studys_cache_size(name):
    assert load_profile(name).num_blocks > 17_500


@pytest.mark.slow
@pytest.mark.parametrize("name", CONNECTORS)
def test_every_config_can_be_built_and_leaves_the_installed_package_alone(
    name, tmp_path
):
    target = installation().package("vllm") / "v1/core/sched/scheduler.py"
    before = target.read_bytes()
    connector = load_connector(name)
    overlay = tmp_path / "overlay"
    hashes = build_overlay(overlay, connector.patches, connector.patch_parameters)
    patches = patcher.load_patches(PATCHES)
    release = patcher.Tree(installation().package("vllm")).version
    assert list(hashes) == [
        patch
        for patch in connector.patches
        if patches[patch].package != "vllm" or patches[patch].is_needed(release)
    ]
    patched = overlay / SOURCES / "vllm/v1/engine/core.py"
    assert b"BLOCK_BEGIN step_timing_v2" in patched.read_bytes()
    assert target.read_bytes() == before


def spec(
    name: str, connector: Connector | None = None, error: str | None = None
) -> TrialSpec:
    """Specify the first trial of a config, which no test runs."""
    connector = connector or Connector("", [])
    settings, model = load_profile("cpu-smoke"), Checkpoint(Path(), 1_000)
    installed = installation()
    return TrialSpec(name, connector, settings, model, installed, Path(), {}, error)


@pytest.mark.slow
def test_odd_rounds_go_backwards_so_that_a_drift_affects_all_configs_alike():
    first = {name: spec(name) for name in "abc"}
    rounds = [
        [(trial.config, trial.repeat) for trial in round_of(first, repeat, names)]
        for repeat, names in ((0, None), (1, None), (2, None), (3, ["c", "a"]))
    ]
    assert rounds == [
        [("a", 0), ("b", 0), ("c", 0)],
        [("c", 1), ("b", 1), ("a", 1)],
        [("a", 2), ("b", 2), ("c", 2)],
        [("a", 3), ("c", 3)],
    ]


def test_a_trial_s_record_keeps_no_password_of_its_connector(tmp_path):
    config = {"kv_role": "both", "kv_connector_extra_config": {"x": "sesame"}}
    connector = Connector("", [], kv_transfer_config=config)
    run_trial(tmp_path / "r0", spec("own", connector, "its patch does not fit"))
    written = (tmp_path / "r0" / "trial.json").read_text()
    assert "both" in written and "sesame" not in written


@pytest.mark.slow
def test_a_config_whose_patch_does_not_fit_does_not_sink_the_others(
    tmp_path, monkeypatch
):
    connector_file = (
        "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
    )
    read = patcher.Tree.read

    def changed(tree: patcher.Tree, path: str) -> bytes | None:
        text = read(tree, path)
        if text is not None and path == connector_file:
            return text.replace(b"return meta", b"return (meta, 1)")
        return text

    monkeypatch.setattr(patcher.Tree, "read", changed)
    configs = {
        name: load_connector(name) for name in ("noop", "mooncake_both_hash_sync")
    }
    patches, errors = build_overlays(tmp_path, configs, installation())
    assert set(patches) == {"noop"}
    assert "return meta" in errors["mooncake_both_hash_sync"]


def test_a_misspelt_field_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "connectors").mkdir()
    text = (CONFIGS / "connectors" / "noop.toml").read_text()
    file = tmp_path / "connectors" / "noop.toml"
    file.write_text(text.replace("summary", "sumary"))
    monkeypatch.setattr("kvtax.engine.connector.CONFIGS", tmp_path)
    with pytest.raises(ConfigError, match=r"noop\.toml.*sumary"):
        load_connector("noop")


def use_a_lock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the machine's lock alone, which a measurement beside may hold."""
    name = f"kvtax-test-{os.getpid()}.lock"
    monkeypatch.setattr(machine_lock_module, "MEASUREMENT", name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "nothing"], "cpu-smoke"),
        (["--only", "nothing"], "nixl_both"),
        (["--repeats", "0"], "at least 1"),
        (["--model", "/tmp"], "no use for --model"),
        (["--resume"], "a run to resume"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(
    arguments, message, tmp_path, monkeypatch, capsys
):
    use_a_lock_of_its_own(monkeypatch)
    assert main(["sweep", "--out", str(tmp_path / "run"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_second_sweep_on_the_same_machine_is_refused(tmp_path, monkeypatch, capsys):
    use_a_lock_of_its_own(monkeypatch)
    with machine_lock():
        assert main(["sweep", "--out", str(tmp_path / "run")]) == Exit.BUSY
    assert "another sweep or experiment is running" in capsys.readouterr().err


WALL_S = 60.0


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A walk that grows, a config that never does, and one with half of its servers."""
    truths = [
        Truth("walk", slope=40.0),
        Truth("plain"),
        Truth("unsure", slope=2.0, repeat_offsets=(0.0, 60.0)),
    ]
    return write_run(tmp_path_factory.mktemp("run"), truths, repeats=3)


def trials(repeats: int = 3) -> list[TrialRecord]:
    return [
        TrialRecord(
            config=name,
            repeat=repeat,
            status="ok",
            num_blocks=1,
            block_size=16,
            wall_s=WALL_S,
        )
        for name in ("walk", "plain", "unsure")
        for repeat in range(repeats)
    ]


def profile(**changes: float) -> Profile:
    wanted = {"repeats": 3, "most_repeats": 5, "minutes": 60.0} | changes
    return msgspec.structs.replace(load_profile("cpu"), **wanted)


@pytest.mark.slow
def test_what_is_undecided_is_measured_again_and_nothing_else(run_dir):
    assert configs_of_next_round(run_dir, profile(), trials()) == ["unsure"]


def test_no_config_is_measured_on_more_servers_than_the_profile_allows(run_dir):
    assert configs_of_next_round(run_dir, profile(most_repeats=3), trials()) == []


@pytest.mark.slow
def test_a_sweep_ends_within_its_time(run_dir):
    # Nine trials of a minute each.
    assert configs_of_next_round(run_dir, profile(minutes=9.5), trials()) == []
    assert configs_of_next_round(run_dir, profile(minutes=10.0), trials()) == ["unsure"]


@pytest.mark.slow
def test_a_config_that_lost_servers_is_measured_again(run_dir):
    # They were set aside, or failed: fewer count than the profile asks for.
    asked = profile(repeats=4)
    names = configs_of_next_round(run_dir, asked, trials())
    assert set(names) == {"walk", "plain", "unsure"}


@pytest.mark.slow
def test_what_needs_least_to_be_decided_comes_first(tmp_path):
    wide = Truth("wide", slope=2.0)
    truths = [wide, Truth("plain"), Truth("narrow", slope=2.0)]
    folder = write_run(tmp_path, truths, repeats=2, steps=16_000)
    # The same at the margin, known from a sixteenth of the steps.
    shutil.rmtree(folder / "wide")
    for repeat in range(2):
        write_trial(folder, wide, repeat, seed=20 + repeat, steps=1_000, blocks=16_000)
    names = wanting(folder, profile(repeats=2))
    assert names.index("narrow") < names.index("wide")


def test_a_server_that_started_cold_is_named_with_the_reason():
    facts = {"status": "ok", "num_blocks": 1, "block_size": 16, "wall_s": WALL_S}
    trial = TrialRecord(config="plain", repeat=0, ready_s=15.0, **facts)
    assert "cold" not in outcome_line(trial)
    cold = msgspec.structs.replace(trial, cold_start="vllm is imported")
    assert outcome_line(cold).endswith("; started cold: vllm is imported")


PROFILE = load_profile("cpu-smoke")
OWN_BLOCKS = 3


def write_first_step(folder: Path, **changes: int | None) -> None:
    fields = {
        "step_id": 0,
        "prefill_tokens": OWN_BLOCKS * PROFILE.block_size + 1,
        "cache_size": OWN_BLOCKS,
    }
    with LineFile(folder / "engine_step.jsonl", EngineHeader(pid=1)) as file:
        file.append(EngineStep(t_ns=1, **fields | changes))


def test_a_server_that_caches_its_own_first_prompt_is_fresh(tmp_path: Path) -> None:
    write_first_step(tmp_path)
    _check_fresh(tmp_path, PROFILE)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cache_size": OWN_BLOCKS + 1}, "found 1 cached blocks that it did not bring"),
        ({"step_id": 1}, "was not fresh: its first step .id 1."),
        ({"cache_size": None}, "step_timing_v2"),
    ],
)
def test_any_other_server_is_refused(
    tmp_path: Path, changes: dict[str, int | None], why: str
) -> None:
    write_first_step(tmp_path, **changes)
    with pytest.raises(TrialError, match=why):
        _check_fresh(tmp_path, PROFILE)


def test_an_engine_without_a_step_is_refused(tmp_path: Path) -> None:
    LineFile(tmp_path / "engine_step.jsonl", EngineHeader(pid=1)).__exit__()
    with pytest.raises(TrialError, match="did not record"):
        _check_fresh(tmp_path, PROFILE)


SERVING = load_connector("direct_read_serving")
# Three prompts of two blocks before a reset of the cache, two after it.
PASSES = [
    [[bytes([number, block]) for block in range(2)] for number in numbers]
    for numbers in (range(3), range(3, 5))
]


class Instance:
    """Has some of the prompts' blocks; notes which prompts were asked for."""

    def __init__(self) -> None:
        self.has: set[bytes] = set()
        self.asked: list[int] = []

    def read(self, hashes: list[bytes]) -> ReadRecord:
        self.asked.append(hashes[0][0])
        offered = len(list(takewhile(self.has.__contains__, hashes)))
        return ReadRecord(t_ns=len(self.asked), offered=offered, valid=offered)


def test_the_peer_reads_the_oldest_whole_prompt_since_the_last_reset():
    instance = Instance()
    turns = reads(instance, PASSES, per_s=1e6)
    assert next(turns).offered == 0
    instance.has = {block for prompt in PASSES[0] for block in prompt}
    assert [read.offered for read in islice(turns, 3)] == [2, 2, 2]
    assert instance.asked[-3:] == [0, 0, 0]
    # The end of a prompt is evicted first.
    instance.has -= {PASSES[0][0][1]}
    assert next(turns).offered == 2 and instance.asked[-1] == 1
    instance.has = set(PASSES[1][0])
    assert next(turns).offered == 2 and instance.asked[-1] == 3
    instance.has |= set(PASSES[1][1])
    assert next(turns).offered == 2 and instance.asked[-1] == 3


def write_reads(folder: Path, valid: int, torn: bool = False) -> None:
    lines = [{"schema": "kvtax.reads/1"}]
    lines += [{"t_ns": 10**9 * n, "offered": 4, "valid": valid} for n in range(3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "reads.jsonl").write_text(text + ('{"t_ns":5,"of' if torn else ""))
    (folder / "peer.log").write_text("a reason\n")


def test_a_trial_whose_peer_read_nothing_fails(tmp_path: Path):
    write_reads(tmp_path, valid=0)
    with pytest.raises(PeerError, match=r"(?s)no valid block in 3 turns.*a reason"):
        count_reads(tmp_path)


def test_what_the_peer_read_is_counted_up_to_a_torn_line(tmp_path: Path):
    write_reads(tmp_path, valid=3, torn=True)
    counts = ReadCounts(reads=3, blocks_offered=12, blocks_valid=9, seconds=2.0)
    assert count_reads(tmp_path) == counts


@pytest.mark.slow
def test_a_trial_whose_peer_cannot_start_fails_with_its_last_words(tmp_path: Path):
    with (
        pytest.raises(PeerError, match=r"(?s)did not start.*plan\.json"),
        peer(tmp_path, SERVING, 16, reserve(1)[0]),
    ):
        pytest.fail("it has no plan")
