# SPDX-License-Identifier: Apache-2.0
"""Specify the trials of a sweep on one machine: patches and model, shared by all."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvtax.engine import preflight
from kvtax.engine.connector import Connector
from kvtax.engine.installation import Installation
from kvtax.engine.overlay import build_overlay
from microbench.profile import Profile
from microbench.trial import TrialSpec


@contextmanager
def first_trials(
    folder: Path, profile: Profile, installed: Installation
) -> Iterator[dict[str, TrialSpec]]:
    """Specify the first trial of each config.

    Overlays and model are in `folder`; the overlays are deleted at the end. A config
    that cannot be measured has its error in its trial. Raises PreflightError if nothing
    can be measured.
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
        growing = profile.growing()
        yield {
            name: TrialSpec(
                name,
                connector,
                profile,
                model,
                installed,
                overlays / name,
                patches.get(name, {}),
                errors.get(name),
                grows=name in growing,
            )
            for name, connector in connectors.items()
        }
    finally:
        shutil.rmtree(overlays, ignore_errors=True)


def round_of(
    first: Mapping[str, TrialSpec], repeat: int, names: Iterable[str] | None = None
) -> list[TrialSpec]:
    """Specify the `repeat`-th trial of each of `names`, or of all configs.

    Even repeats go forwards, odd ones backwards, so that a drift of the machine
    affects all configs alike.
    """
    order = list(first if names is None else names)
    if repeat % 2:
        order.reverse()
    return [dataclasses.replace(first[name], repeat=repeat) for name in order]


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
