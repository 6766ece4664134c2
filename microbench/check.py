# SPDX-License-Identifier: Apache-2.0
"""run_all.sh --check: would a sweep of this profile start here? Starts no server."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lab.config import ConfigError
from lab.paths import REPOSITORY
from lab.serving import preflight
from lab.serving.errors import ServerError
from lab.serving.installation import Installation
from lab.serving.preflight import PreflightError
from lab.serving.tree import link_package
from microbench.fitted import choices, fitted
from microbench.profile import Profile
from microbench.trees import build_trees


def check(profile: Profile, installed: Installation) -> int:
    """Print all reasons against a sweep of `profile`, and return the exit status."""
    found = []
    try:
        profile = fitted(profile)
    except (ConfigError, PreflightError) as error:
        found.append(str(error))
    found += reasons(profile, installed)
    for choice in choices(profile):
        print(f"run_all: {choice}")
    if not found:
        print(f"run_all: profile {profile.name} can be measured here")
        return 0
    print(f"run_all: profile {profile.name} cannot be measured here:", file=sys.stderr)
    for reason in dict.fromkeys(found):
        print("  - " + reason.replace("\n", "\n    "), file=sys.stderr)
    return 1


def reasons(profile: Profile, installed: Installation) -> Iterator[str]:
    """Each thing that would stop a sweep, or one of its configs."""
    yield from preflight.resource_problems(profile, installed=installed)
    runs = REPOSITORY / "runs"
    runs.mkdir(exist_ok=True)
    # In this file system, so that the trees can be hard links.
    with tempfile.TemporaryDirectory(prefix="check-", dir=runs) as scratch:
        trees = Path(scratch)
        try:
            profile.checkpoint(trees / "model")
        except ConfigError as error:
            yield str(error)
        # What is missing was said already, as a resource.
        try:
            link_package(installed.package("vllm"), trees / "base")
        except ModuleNotFoundError:
            return
        try:
            preflight.check_import(trees / "base", profile, installed)
        except ServerError:
            pass
        except PreflightError as error:
            yield str(error)
        _, errors = build_trees(trees, profile.connectors(), installed)
        for error in dict.fromkeys(errors.values()):
            names = ", ".join(name for name in errors if errors[name] == error)
            yield f"{names}: {error}"
