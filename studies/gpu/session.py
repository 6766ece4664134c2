# SPDX-License-Identifier: Apache-2.0
"""The fifteen minutes of a GPU that are worth most, by themselves.

    python -m studies.gpu.session --out runs/gpu --profile gpu-sources
    python -m studies.gpu.session --out runs/dry --dry-run     # a null model, no GPU

Registered first: the walk raises the TPOT of clients under asynchronous scheduling by
0.3 ms. Plain vLLM and the walk take turns on one machine (plain, walk, walk, plain),
each with 14 holds at an empty and at a nearly full cache; beside every second hold
prompts are computed. Then, while there is time, one server each of: no-op, fixed
Mooncake, NIXL, offloading without hits; and prompts of growing length on plain vLLM.
All records stay in --out, and the table is written after each server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtax.engine import preflight, provenance
from kvtax.engine.connector import STAND_INS, load_connector
from kvtax.engine.installation import installation
from kvtax.load.plan import Plan, PlannedPhase
from kvtax.records.files import write_document, write_whole
from kvtax.records.requests import Phase, place_of
from kvtax.report.markdown import table
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats
from kvtax.stats.quantiles import tpot_of
from kvtax.stats.resampling import over_rounds
from microbench.profile import Profile, load_profile
from microbench.specs import first_trials, round_of
from microbench.trial import TrialSpec, run_trial
from studies.gpu.__main__ import added

PLAIN, WALK = "plain", "mooncake_both_hash_sync"
ABBA = ((PLAIN, 0), (WALK, 0), (WALK, 1), (PLAIN, 1))
OFFLOADING = "observatory/offloading"
THEN = ("noop", "mooncake_both_fixed", "nixl_both", OFFLOADING)
PREFILL = "prefill"
LEVELS, PASSES = [0.0, 0.92], 7
PREFILL_TOKENS = (512, 1_024, 2_048, 4_096, 8_000)
BESIDE_TOKENS, PREFILLS = 2_048, 4
# What is fast on a GPU is left out where it would only take time.
DRY = {"num_blocks": 2_000}
DRY_PASSES, DRY_OUTPUT = 2, 40


class Session(Profile, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A profile without growth, whose odd passes compute prompts beside each hold."""

    def plan(self, model: str, vocab_size: int, repeat: int, grows: bool) -> Plan:
        """Plan the holds; of the repeat after them, prompts of growing length."""
        whole = super().plan(model, vocab_size, repeat, grows)
        kinds = Phase.FILL, Phase.HOLD
        held = [phase for phase in whole.phases if Phase.of(phase.name) in kinds]
        phases = _prefill_ladder() if repeat > 1 else [_beside(p) for p in held]
        return msgspec.structs.replace(whole, phases=phases)


def _beside(phase: PlannedPhase) -> PlannedPhase:
    """Have every second hold beside prompts that take time."""
    if Phase.of(phase.name) is not Phase.HOLD or place_of(phase.name).number % 2 == 0:
        return phase
    return msgspec.structs.replace(
        phase, prompt_tokens=BESIDE_TOKENS, requests=PREFILLS
    )


def _prefill_ladder() -> list[PlannedPhase]:
    return [
        PlannedPhase(
            Phase.FILL.at(number, 0, 0),
            1,
            1.0,
            after_answers=True,
            prompt_tokens=tokens,
            output_tokens=1,
            reset_prefix_cache=number == 0,
        )
        for number, tokens in enumerate(PREFILL_TOKENS * PREFILLS)
    ]


class Row(msgspec.Struct):
    """A config's holds at a nearly full cache."""

    config: str
    servers: int
    holds: int
    gap_ms: Estimate
    itl_p99_ms: Estimate
    tpot_ms: float
    tpot_added_ms: Estimate | None


def rows(folder: Path, profile: Profile) -> list[Row]:
    """Compute a row of each config with a finished server."""
    level = len(profile.load.ladder.levels) - 1
    least = profile.load.ladder.levels[level] * profile.num_blocks * 0.9
    batch = profile.load.ladder.decoders
    found, plain = [], None
    for config in dict.fromkeys([PLAIN, WALK, *THEN]):
        servers = sorted(folder.glob(f"{config}/r[01]"))
        servers = [one for one in servers if _ended_well(one)]
        if not servers:
            continue
        gaps = np.concatenate([_gaps_ms(one, batch, least) for one in servers])
        tpot = np.concatenate([_tpot_ms(one, level) for one in servers])
        plain = tpot if config == PLAIN else plain
        found.append(
            Row(
                config,
                len(servers),
                len(tpot),
                Estimate.of(over_rounds(gaps)),
                Estimate.of(over_rounds(gaps, _p99)),
                float(tpot.mean()),
                None if config == PLAIN or plain is None else added(tpot, plain),
            )
        )
    return found


def _p99(values: Floats) -> float:
    return float(np.quantile(values, 0.99))


def _ended_well(server: Path) -> bool:
    record = server / "trial.json"
    return record.exists() and json.loads(record.read_text())["status"] == "ok"


def _records(server: Path, name: str) -> list[Any]:
    (file,) = server.rglob(name)
    return [json.loads(line) for line in file.read_text().splitlines()]


def _gaps_ms(server: Path, batch: int, least_blocks: float) -> Floats:
    """Return ms between decode-only steps of a full batch that follow each other."""
    steps = [one for one in _records(server, "engine_step.jsonl") if "t_ns" in one]
    counts = [
        step["decode_tokens"] == batch
        and not step["prefill_tokens"]
        and step["cache_size"] >= least_blocks
        for step in steps
    ]
    pairs = zip(itertools.pairwise(steps), itertools.pairwise(counts), strict=True)
    return np.array(
        [
            (later["t_ns"] - one["t_ns"]) / 1e6
            for (one, later), is_in in pairs
            if all(is_in)
        ]
    )


def _tpot_ms(server: Path, level: int) -> Floats:
    """Return mean TPOT of each hold at a level, ms."""
    of_hold: dict[str, list[float]] = defaultdict(list)
    for one in _records(server, "requests.jsonl"):
        phase = str(one.get("phase", ""))
        if phase.endswith(".decoders") and place_of(phase).level == level:
            times = one["first_token_ns"], one["end_ns"], one["output_tokens"]
            of_hold[one["phase"]].append((tpot_of(*times) or 0) / 1e6)
    return np.array([np.mean(of) for of in of_hold.values()])


def prefill_ms(folder: Path) -> dict[int, list[float]]:
    """Return TTFT by prompt length, ms, if the ladder of prompts was run."""
    server = folder / PLAIN / "r2"
    found: dict[int, list[float]] = defaultdict(list)
    if _ended_well(server):
        for one in _records(server, "requests.jsonl"):
            if one.get("first_token_ns"):
                ttft_ms = (one["first_token_ns"] - one["sent_ns"]) / 1e6
                found[one["prompt_tokens"]].append(round(ttft_ms, 3))
    return found


def page(found: list[Row], prefills: dict[int, list[float]], errors: list[str]) -> str:
    """Render what there is so far."""
    head = ["config", "servers", "holds", "median gap, ms", "p99 of gaps, ms"]
    head += ["mean TPOT, ms", "more than plain"]
    body = [
        [
            f"`{row.config}`",
            str(row.servers),
            str(row.holds),
            f"{row.gap_ms:.3f}",
            f"{row.itl_p99_ms:.3f}",
            f"{row.tpot_ms:.2f}",
            f"{row.tpot_added_ms:+.2f}" if row.tpot_added_ms else "",
        ]
        for row in found
    ]
    parts = [table(head, body)]
    if prefills:
        ttft = [
            [f"{n:,}", f"{np.median(of):.1f}"] for n, of in sorted(prefills.items())
        ]
        parts.append(table(["prompt tokens", "TTFT, ms"], ttft))
    return "\n\n".join([*parts, *errors]) + "\n"


def run_servers(
    first: Mapping[str, TrialSpec], out: Path, deadline_s: float, profile: Profile
) -> int:
    """Run servers until the time is over; write the table after each. The exit code."""
    errors: list[str] = []
    order = [*ABBA, *((name, 0) for name in THEN), (PLAIN, 2)]
    longest_s = 0.0
    for config, repeat in order:
        began_s = time.monotonic()
        if began_s + longest_s > deadline_s:
            errors.append(f"No time was left for `{config}`, server {repeat}.")
            continue
        (planned,) = round_of(first, repeat, [config])
        record = run_trial(out / planned.folder, planned)
        if record.error:
            errors.append(f"`{config}` failed: {record.error.splitlines()[0]}")
        longest_s = max(longest_s, time.monotonic() - began_s)
        found, prefills = rows(out, profile), prefill_ms(out)
        text = page(found, prefills, errors)
        write_whole(out / "session.md", text.encode())
        facts = provenance.collect(planned.patches, "python -m studies.gpu.session")
        document = {"rows": found, "prefill_ms": prefills, "errors": errors}
        write_document(out / "session.json", {"provenance": facts} | document)
        print(f"{config}, server {repeat}: {record.status}", flush=True)
    print(text)
    return 3 if errors else 0


def session(name: str, dry_run: bool) -> Session:
    """Make the session's settings of a profile."""
    base = load_profile("cpu-7ms" if dry_run else name)
    passes = DRY_PASSES if dry_run else PASSES
    changes: dict[str, Any] = {"levels": LEVELS, "passes": passes}
    if dry_run:
        changes["output_tokens"] = DRY_OUTPUT
    ladder = msgspec.structs.replace(base.load.ladder, **changes)
    load = msgspec.structs.replace(base.load, ladder=ladder)
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    configs = [PLAIN, WALK, *THEN]
    fields |= {"load": load, "configs": configs, "repeats": 2, "most_repeats": 2}
    if not dry_run:
        # Its streams and copies are real ones on a GPU.
        offloading = load_connector(OFFLOADING)
        real = [name for name in offloading.patches if name not in STAND_INS]
        patched = msgspec.structs.replace(offloading, patches=real)
        fields["own"] = {OFFLOADING: patched}
    return Session(**fields | (DRY if dry_run else {}))


def main() -> int:
    """Run the session; return 0 if every server was measured."""
    parser = argparse.ArgumentParser(
        "python -m studies.gpu.session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-session"))
    parser.add_argument("--profile", default="gpu-sources", help="default gpu-sources")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, smaller")
    arguments = parser.parse_args()
    profile = session(arguments.profile, arguments.dry_run)
    deadline_s = time.monotonic() + 60 * arguments.minutes
    out = arguments.out.resolve()
    try:
        preflight.check_machine(profile)
        with first_trials(out, profile, installation()) as first:
            return run_servers(first, out, deadline_s, profile)
    except preflight.PreflightError as error:
        print(f"gpu session: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
