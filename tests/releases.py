# SPDX-License-Identifier: Apache-2.0
"""Pythons of tests: that of the vLLM that is tested, of other releases, and a bare one.

TEST_VLLM names one of locks/releases/ to be tested instead of the installed one
(make release-test).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvtax.engine.installation import Installation, installation
from kvtax.engine.releases import release as environment_of
from kvtax.paths import REPOSITORY

INSTALLED = os.environ.get("TEST_VLLM", "0.18.1")


def under_test() -> Installation:
    """The Python that runs the vLLM that is tested."""
    return environment_of(INSTALLED) if "TEST_VLLM" in os.environ else installation()


def package_of(release: str) -> Path:
    """The release's vllm folder; skips the test if it is not on this machine."""
    if release == INSTALLED:
        try:
            return under_test().package("vllm")
        except ModuleNotFoundError:
            pytest.skip("vllm is not installed")
    package = REPOSITORY / "third_party" / f"vllm-{release}" / "vllm"
    if not package.is_dir():
        pytest.skip(f"no {package.relative_to(REPOSITORY)}: run make vllm-releases")
    return package


def bare_environment(venv: Path) -> Path:
    """Make a virtual environment without a package; return its site-packages."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix, 'bin')}\n")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = venv / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    return packages
