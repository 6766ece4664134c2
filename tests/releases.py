# SPDX-License-Identifier: Apache-2.0
"""Where the Python files of vLLM's releases are."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.paths import REPOSITORY
from lab.serving.tree import installed_package

INSTALLED = "0.18.1"


def package_of(release: str) -> Path:
    """The release's vllm folder; skips the test if it is not on this machine."""
    if release == INSTALLED:
        try:
            return installed_package("vllm")
        except ModuleNotFoundError:
            pytest.skip("vllm is not installed")
    package = REPOSITORY / "third_party" / f"vllm-{release}" / "vllm"
    if not package.is_dir():
        pytest.skip(f"no {package.relative_to(REPOSITORY)}: run make vllm-releases")
    return package
