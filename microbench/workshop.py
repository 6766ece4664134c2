# SPDX-License-Identifier: Apache-2.0
"""Patches and model, shared by all trials of a sweep on one machine."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtax.engine import preflight
from kvtax.engine.connector import Connector
from kvtax.engine.installation import Installation
from kvtax.engine.overlay import build_overlay
from microbench.profile import Profile
from microbench.trial import PlannedTrial, SweepSettings, TrialRecord, run_trial


@dataclass(frozen=True)
class Workshop:
    """Settings of trials, and an overlay for each config.

    `ready` holds the first trial of each.
    """

    overlays: Path
    common: SweepSettings
    ready: dict[str, PlannedTrial]

    def round(
        self, repeat: int, names: Iterable[str] | None = None
    ) -> list[PlannedTrial]:
        """Plan a trial of each of `names`, or of all configs.

        Even repeats go forwards, odd ones backwards, so that a drift of the machine
        affects all configs alike.
        """
        order = list(self.ready if names is None else names)
        if repeat % 2:
            order.reverse()
        return [dataclasses.replace(self.ready[name], repeat=repeat) for name in order]

    def run(
        self,
        folder: Path,
        planned: PlannedTrial,
        sampled: bool = False,
        start_cold: bool = False,
    ) -> TrialRecord:
        """Run the trial as run_trial does, with these SweepSettings."""
        common = dataclasses.replace(
            self.common, sampled=sampled, start_cold=start_cold
        )
        return run_trial(folder, planned, self.overlays / planned.config, common)


@contextmanager
def workshop(
    folder: Path, profile: Profile, installed: Installation
) -> Iterator[Workshop]:
    """Build overlays and model in `folder`; the overlays are deleted at the end.

    Raises PreflightError if nothing can be measured. A config that cannot be measured
    has its error in its trial.
    """
    connectors = profile.connectors()
    folder.mkdir(parents=True, exist_ok=True)
    overlays = folder / "overlays"
    # Left by a sweep that was killed.
    shutil.rmtree(overlays, ignore_errors=True)
    overlays.mkdir()
    try:
        installed = preflight.check_import(overlays, profile, installed)
        model = profile.checkpoint(folder / "model")
        patches, errors = build_overlays(overlays, connectors, installed)
        ready = {
            name: PlannedTrial(name, 0, conn, patches.get(name, {}), errors.get(name))
            for name, conn in connectors.items()
        }
        yield Workshop(overlays, SweepSettings(profile, model, installed), ready)
    finally:
        shutil.rmtree(overlays, ignore_errors=True)


def build_overlays(
    folder: Path, connectors: dict[str, Connector], installed: Installation
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Build an overlay per config; return patch hashes, and errors of the rest."""
    patches: dict[str, dict[str, str]] = {}
    errors: dict[str, str] = {}
    for name, connector in connectors.items():
        try:
            preflight.check_connector(connector, installed)
            patches[name] = build_overlay(
                folder / name,
                connector.patches,
                connector.patch_parameters,
                installed,
            )
        except preflight.CONFIG_ERRORS as error:
            errors[name] = f"preflight: {error}"
    return patches, errors
