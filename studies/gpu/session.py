# SPDX-License-Identifier: Apache-2.0
"""Measure on a GPU what the walk adds to TPOT, in calls of at most nine minutes.

    python -m studies.gpu.session --out runs/gpu --pack results
    python -m studies.gpu.session --out runs/dry --dry-run     # a null model, no GPU

Plain vLLM and the walk take turns on one machine (plain, walk, walk, plain), each with
14 holds at an empty and at a nearly full cache; beside every second hold prompts are
computed. Then come one server each of no-op, fixed Mooncake, NIXL and offloading
without hits, and prompts of growing length on plain vLLM. After each server the table
is written, and --pack FOLDER has table, result and all records, as three files. A
second call with the same --out keeps the finished servers; on another machine --from
FILE brings the records of the first call.

Registered first: with asynchronous scheduling the walk adds 0.3 ms to clients' TPOT. An
interval above 0 confirms that it adds, one below 0.15 ms refutes it. Every other config
adds less than 0.15 ms: an interval below confirms that, one above refutes it. Any other
interval leaves the question open. Intervals hold the next server: they are of server
means, and a config with one server has the spread of those with two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import sysconfig
import tarfile
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
from kvtax.stats.distribution import Floats, t_quantile
from kvtax.stats.quantiles import tpot_of
from kvtax.stats.resampling import over_rounds
from microbench.profile import Profile, load_profile
from microbench.specs import first_trials, round_of
from microbench.trial import TrialSpec, run_trial

PLAIN, WALK = "plain", "mooncake_both_hash_sync"
PAGE, RESULT = "session.md", "session.json"
# Servers count from 1: whatever is special in a sweep's first server is left out.
ABBA = ((PLAIN, 1), (WALK, 1), (WALK, 2), (PLAIN, 2))
OFFLOADING = "observatory/offloading"
THEN = ("noop", "mooncake_both_fixed", "nixl_both", OFFLOADING)
# The most valuable first; the last is the ladder of prompts.
LADDER = 3
ORDER = (*ABBA, *((name, 1) for name in THEN), (PLAIN, LADDER))
# What the walk adds if the registered claim holds, less half; ms of TPOT.
LEAST_ADDED_MS = 0.15
# Written by studies.gpu.pack: the commit, where there is no history.
PACKED = "packed.json"
TPOT_FIELDS = ("first_token_ns", "end_ns", "output_tokens")
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
        phases = _prefill_ladder() if repeat == LADDER else [_beside(p) for p in held]
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

    @property
    def outcome(self) -> str:
        """Return what the interval does to the registered claim."""
        if self.tpot_added_ms is None or self.tpot_added_ms.ci95 is None:
            return ""
        low, high = self.tpot_added_ms.ci95
        least_ms = 0.0 if self.config == WALK else LEAST_ADDED_MS
        adds, adds_not = low > least_ms, high < LEAST_ADDED_MS
        if self.config != WALK:
            adds, adds_not = adds_not, adds
        return "confirmed" if adds else "refuted" if adds_not else "open"


def rows(folder: Path, profile: Profile) -> list[Row]:
    """Compute a row of each config with a finished server."""
    level = len(profile.load.ladder.levels) - 1
    least = profile.load.ladder.levels[level] * profile.num_blocks * 0.9
    batch = profile.load.ladder.decoders
    measured = {
        config: [server for server in servers if _ended_well(server)]
        for config in dict.fromkeys([PLAIN, WALK, *THEN])
        if (servers := sorted(folder.glob(f"{config}/r[12]")))
    }
    measured = {config: servers for config, servers in measured.items() if servers}
    tpots = {
        config: [_tpot_ms(server, level) for server in servers]
        for config, servers in measured.items()
    }
    means = {
        config: np.array([holds.mean() for holds in of_servers])
        for config, of_servers in tpots.items()
    }
    table_rows = []
    for config, servers in measured.items():
        gaps = np.concatenate([_gaps_ms(server, batch, least) for server in servers])
        table_rows.append(
            Row(
                config,
                len(servers),
                sum(map(len, tpots[config])),
                Estimate.of(over_rounds(gaps)),
                Estimate.of(over_rounds(gaps, _p99)),
                float(means[config].mean()),
                None if config == PLAIN else added(config, means),
            )
        )
    return table_rows


def added(config: str, means: Mapping[str, Floats]) -> Estimate | None:
    """Compare server means with plain vLLM's: (servers,) ms by config.

    The spread between servers is pooled over the configs that have several; with none
    of those the difference has no interval.
    """
    own, plain = means[config], means.get(PLAIN)
    if plain is None:
        return None
    several = [values for values in means.values() if len(values) > 1]
    df = sum(len(values) - 1 for values in several)
    difference = float(own.mean() - plain.mean())
    if df == 0:
        return Estimate(difference)
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in several)
    error = np.sqrt(squares / df * (1 / len(own) + 1 / len(plain)))
    half = float(t_quantile(0.975, df) * error)
    return Estimate(difference, (difference - half, difference + half))


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
    records = _records(server, "engine_step.jsonl")
    steps = [step for step in records if "t_ns" in step]
    counts = [
        step["decode_tokens"] == batch
        and not step["prefill_tokens"]
        and step["cache_size"] >= least_blocks
        for step in steps
    ]
    pairs = zip(itertools.pairwise(steps), itertools.pairwise(counts), strict=True)
    return np.array(
        [
            (later["t_ns"] - earlier["t_ns"]) / 1e6
            for (earlier, later), is_in in pairs
            if all(is_in)
        ]
    )


def _tpot_ms(server: Path, level: int) -> Floats:
    """Return mean TPOT of each hold at a level, ms."""
    of_hold: dict[str, list[float]] = defaultdict(list)
    for request in _records(server, "requests.jsonl"):
        phase = str(request.get("phase", ""))
        if phase.endswith(".decoders") and place_of(phase).level == level:
            times = (request[name] for name in TPOT_FIELDS)
            of_hold[phase].append((tpot_of(*times) or 0) / 1e6)
    return np.array([np.mean(of) for of in of_hold.values()])


def prefill_ms(folder: Path) -> dict[int, list[float]]:
    """Return TTFT by prompt length, ms, if the ladder of prompts was run."""
    server = folder / PLAIN / f"r{LADDER}"
    ttft_of: dict[int, list[float]] = defaultdict(list)
    if _ended_well(server):
        for request in _records(server, "requests.jsonl"):
            if request.get("first_token_ns"):
                ttft_ms = (request["first_token_ns"] - request["sent_ns"]) / 1e6
                ttft_of[request["prompt_tokens"]].append(round(ttft_ms, 3))
    return ttft_of


def page(
    table_rows: list[Row], prefills: dict[int, list[float]], errors: list[str]
) -> str:
    """Render what there is so far."""
    head = ["config", "servers", "holds", "median gap, ms", "p99 of gaps, ms"]
    head += ["mean TPOT, ms", "more than plain", "registered claim"]
    body = [
        [
            f"`{row.config}`",
            str(row.servers),
            str(row.holds),
            f"{row.gap_ms:.3f}",
            f"{row.itl_p99_ms:.3f}",
            f"{row.tpot_ms:.2f}",
            f"{row.tpot_added_ms:+.2f}" if row.tpot_added_ms else "",
            row.outcome,
        ]
        for row in table_rows
    ]
    parts = [table(head, body)]
    if prefills:
        ttft = [
            [f"{n:,}", f"{np.median(of):.1f}"] for n, of in sorted(prefills.items())
        ]
        parts.append(table(["prompt tokens", "TTFT, ms"], ttft))
    return "\n\n".join([*parts, *errors]) + "\n"


def run_servers(
    first: Mapping[str, TrialSpec],
    out: Path,
    deadline_s: float,
    profile: Profile,
    packed: Path | None,
) -> int:
    """Run the servers that are missing until the time is over; return the exit code.

    Writes table and result after each server, and all that there is into `packed`.
    """
    errors: list[str] = []
    longest_s = 0.0
    for config, repeat in ORDER:
        began_s = time.monotonic()
        (planned,) = round_of(first, repeat, [config])
        if _ended_well(out / planned.folder):
            continue
        # A call runs one server at least.
        if longest_s and began_s + longest_s > deadline_s:
            errors.append(f"No time was left for `{config}`, server {repeat}.")
            continue
        record = run_trial(out / planned.folder, planned)
        if record.error:
            errors.append(f"`{config}` failed: {record.error.splitlines()[0]}")
        longest_s = max(longest_s, time.monotonic() - began_s)
        write_result(out, profile, planned.patches, errors, packed)
        print(f"{config}, server {repeat}: {record.status}", flush=True)
    write_result(out, profile, {}, errors, packed)
    print((out / PAGE).read_text())
    return 3 if errors else 0


def write_result(
    out: Path,
    profile: Profile,
    patches: dict[str, str],
    errors: list[str],
    packed: Path | None,
) -> None:
    """Write PAGE and RESULT, of the servers that have finished; pack them, too."""
    table_rows, prefills = rows(out, profile), prefill_ms(out)
    write_whole(out / PAGE, page(table_rows, prefills, errors).encode())
    facts = provenance.collect(patches, "python -m studies.gpu.session")
    if not facts["git_commit"] and (carried := _site() / PACKED).exists():
        facts |= json.loads(carried.read_text())
    document = {"rows": table_rows, "prefill_ms": prefills, "errors": errors}
    write_document(out / RESULT, {"provenance": facts} | document)
    if packed is not None:
        pack(out, packed)


def _site() -> Path:
    return Path(sysconfig.get_path("purelib"))


def restore(file: Path, out: Path) -> None:
    """Unpack the servers of an earlier call that `out` lacks."""
    with tarfile.open(file) as packed:
        there = {server for server in ORDER if (out / _folder(*server)).is_dir()}
        kept = {f"{_folder(*server)}/" for server in ORDER if server not in there}
        members = [m for m in packed if m.name.startswith(tuple(kept))]
        for member in members:
            if content := packed.extractfile(member):
                unpacked = out / member.name
                unpacked.parent.mkdir(parents=True, exist_ok=True)
                unpacked.write_bytes(content.read())


def _folder(config: str, repeat: int) -> Path:
    return Path(config, f"r{repeat}")


def pack(out: Path, folder: Path) -> None:
    """Copy table and result into `folder`, and the records of all servers as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (PAGE, RESULT):
        write_whole(folder / name, (out / name).read_bytes())
    with tarfile.open(folder / "records.tar.xz", "w:xz") as packed:
        for config, repeat in ORDER:
            server = _folder(config, repeat)
            if _ended_well(out / server):
                packed.add(out / server, server)


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
    parser.add_argument("--minutes", type=float, default=9.0, help="default 9")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="see above")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, smaller")
    arguments = parser.parse_args()
    profile = session(arguments.profile, arguments.dry_run)
    deadline_s = time.monotonic() + 60 * arguments.minutes
    out = arguments.out.resolve()
    if arguments.earlier:
        restore(arguments.earlier, out)
    try:
        preflight.check_machine(profile)
        with first_trials(out, profile, installation()) as first:
            status = run_servers(first, out, deadline_s, profile, arguments.pack)
    except preflight.PreflightError as error:
        print(f"gpu session: {error}", file=sys.stderr)
        return 3
    return status


if __name__ == "__main__":
    sys.exit(main())
