# SPDX-License-Identifier: Apache-2.0
"""Which configs a sweep measures once more: those that its verdicts leave undecided.

After its first repeats a sweep looks at its verdicts, and again after each further
round. To look several times is to give chance several tries. The intervals are widened
for that, by as many looks as the profile allows (microbench/analysis/measured.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from microbench.analysis.analysis import analyse
from microbench.analysis.trials import load_run
from microbench.analysis.undecided import servers_more
from microbench.profile import Profile
from microbench.trial import TrialRecord


def configs_of_next_round(
    run_dir: Path, profile: Profile, records: Sequence[TrialRecord]
) -> list[str]:
    """Configs of `profile` that need another server, as many as its time allows.

    `records` are those of all trials so far, in `run_dir`.
    """
    walls_s = [record.wall_s for record in records if record.wall_s]
    repeats = 1 + max(record.repeat for record in records)
    if repeats >= profile.most_repeats or not walls_s:
        return []
    left_s = 60 * profile.minutes - sum(walls_s)
    affordable = max(int(left_s / np.mean(walls_s)), 0)
    return undecided(run_dir, profile.repeats)[:affordable]


def undecided(run_dir: Path, repeats: int) -> list[str]:
    """The configs of a run that are inconclusive, those first that need least.

    Those too of which fewer than `repeats` servers count, as the machine was too slow.
    """
    run, trials = load_run(run_dir)
    document = analyse(run, trials, None).document
    more = {
        name: servers_more(one, document.noise_floor)
        for name, one in document.configs.items()
        if one.verdict == "inconclusive" or 0 < one.n_repeats < repeats
    }
    return sorted(more, key=more.get)
