# SPDX-License-Identifier: Apache-2.0
"""The runs of the storm in a JSON file, and their sum in Markdown beside it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import blockpatch
from costs.direct_read.engines import PATCHES
from lab.paths import PATCHES as PATCH_FOLDER
from lab.serving.provenance import collect
from lab.stats.markdown import table

AS_IT_IS = "as it is"
# The rows, by the name of the count; the connector's own counts are in its metrics.py.
ROWS = {
    "requests": "requests at B",
    "wrong_requests": "**answers with a wrong token**",
    "wrong_tokens": "wrong tokens",
    "while_a_prefills": "asked while A prefills the prompt",
    "after_a": "asked when A has just answered it",
    "lately_at_a": "asked some answers later",
    "twice": "asked twice at once",
    "resets": "resets of A's prefix cache",
    "lookups": "lookups",
    "lookup_failures": "of them failed",
    "served_in_flight": "stopped at a block still being computed",
    "blocks_offered": "blocks offered",
    "pulls": "pulls",
    "pulls_cut_short": "of them cut short",
    "blocks_pulled": "blocks pulled, and accepted",
    "blocks_rejected": "blocks read, and rejected as evicted",
    "blocks_unread": "blocks offered, and not read",
    "seconds": "seconds",
}

Counts = dict[str, float]


def provenance() -> dict:
    patches = blockpatch.load_patches(PATCH_FOLDER)
    hashes = {name: blockpatch.patch_hash(patches[name]) for name in PATCHES}
    return collect(hashes, "python -m costs.direct_read.storm")


def add_run(out: Path, seed: int, pool: Counts, phases: dict[str, Counts]) -> None:
    """`phases` begin with AS_IT_IS; the others are controls."""
    runs = json.loads(out.read_text()) if out.exists() else []
    runs.append(
        {"seed": seed, "pool": pool, "phases": phases, "provenance": provenance()}
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(runs, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(runs, out.name))


def markdown(runs: list[dict], name: str) -> str:
    pool: Counter[str] = Counter()
    phases: dict[str, Counter[str]] = {}
    for run in runs:
        pool.update(run["pool"])
        for phase, counts in run["phases"].items():
            phases.setdefault(phase, Counter()).update(counts)
    rows = [
        [what, *(f"{counts[row]:,.0f}" for counts in phases.values())]
        for row, what in ROWS.items()
    ]
    made = runs[-1]["provenance"]
    versions = ", ".join(f"{p} {v}" for p, v in made["package_versions"].items())
    seeds = ", ".join(str(run["seed"]) for run in runs)
    commands = sorted({run["provenance"]["command_line"] for run in runs})
    return f"""# Direct read: a storm on two real engines

Instance B reads from A while A prefills, evicts and loses its prefix cache. Each greedy
answer of B is compared with a plain instance's. The controls have the same load, with
one safety measure switched off by the tests, until enough answers were wrong: what was
pulled wrong stays in B's prefix cache and can hurt more than one request.

{table(["", *phases], rows)}

The oracle: of {pool["prompts"]:,.0f} prompts, {pool["seen"]:,.0f} had another answer
when one of their blocks was replaced. What is wrong and changes no token is not seen.

The sum of the runs in `{name}` (seeds: {seeds}), made by

{chr(10).join("    " + command for command in commands)}

On {made["cpu_count"]} cores of {made["cpu_model"]}, Linux {made["kernel"]}, Python
{made["python_version"]}, {versions}, {made["date_utc"]}, commit
{made["git_commit"]}{" with changes" if made["git_dirty"] else ""}.
"""
