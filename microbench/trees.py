# SPDX-License-Identifier: Apache-2.0
"""The private trees of a sweep: vLLM as it is installed, and one per config."""

from __future__ import annotations

from pathlib import Path

from lab.serving import preflight
from lab.serving.connector import Connector
from lab.serving.installation import Installation
from lab.serving.tree import build_tree


def build_trees(
    trees: Path, connectors: dict[str, Connector], installed: Installation
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """A tree per config: the patch hashes of those that fit, the error of the rest.

    `trees` holds vLLM unpatched, in the folder base.
    """
    patches, errors = {}, {}
    for name, connector in connectors.items():
        try:
            preflight.check_connector(connector, installed)
            patches[name] = build_tree(
                trees / name,
                trees / "base" / "vllm",
                connector.patches,
                connector.patch_parameters,
                installed,
            )
        except preflight.CONFIG_ERRORS as error:
            errors[name] = f"preflight: {error}"
    return patches, errors
