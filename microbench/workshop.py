# SPDX-License-Identifier: Apache-2.0
"""What all trials of a sweep use on one machine: a tree per config, and the model."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.serving import preflight
from lab.serving.installation import Installation
from lab.serving.tree import link_package
from microbench.profile import Profile
from microbench.trees import build_trees
from microbench.trial import PlannedTrial, SweepSettings, TrialRecord, run_trial


@dataclass(frozen=True)
class Workshop:
    """Where trials are made; `ready` is the first trial of each config."""

    trees: Path
    common: SweepSettings
    ready: dict[str, PlannedTrial]

    def round(
        self, repeat: int, names: Iterable[str] | None = None
    ) -> list[PlannedTrial]:
        """A trial of each of `names` or of all configs, forwards and backwards in turn.

        So a machine that warms up or slows down does so for all of them alike.
        """
        order = list(self.ready if names is None else names)
        if repeat % 2:
            order.reverse()
        return [dataclasses.replace(self.ready[one], repeat=repeat) for one in order]

    def run(
        self, folder: Path, planned: PlannedTrial, sampled: bool = False
    ) -> TrialRecord:
        """As microbench.trial.run_trial."""
        common = dataclasses.replace(self.common, sampled=sampled)
        return run_trial(folder, planned, self.trees / planned.config, common)


@contextmanager
def workshop(
    folder: Path, profile: Profile, installed: Installation
) -> Iterator[Workshop]:
    """Make it in `folder`, where the model stays; the trees are gone afterwards.

    Raises PreflightError if nothing can be measured. A config alone that cannot be says
    so in its trial.
    """
    connectors = profile.connectors()
    folder.mkdir(parents=True, exist_ok=True)
    trees = folder / "trees"
    # Left by a sweep that was killed.
    shutil.rmtree(trees, ignore_errors=True)
    try:
        base = trees / "base"
        link_package(installed.package("vllm"), base)
        preflight.check_import(base, profile, installed)
        model = profile.checkpoint(folder / "model")
        patches, errors = build_trees(trees, connectors, installed)
        ready = {
            name: PlannedTrial(name, 0, one, patches.get(name, {}), errors.get(name))
            for name, one in connectors.items()
        }
        yield Workshop(trees, SweepSettings(profile, model, installed), ready)
    finally:
        shutil.rmtree(trees, ignore_errors=True)
