# SPDX-License-Identifier: Apache-2.0
"""An overlay for processes of ours: patches that they get as they import vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvtax import patcher
from kvtax.engine.installation import Installation, installation
from kvtax.paths import IN_CHECKOUT, PACKAGE, PATCHES


def build_overlay(
    folder: Path,
    patch_names: Sequence[str],
    parameters: Mapping[str, object],
    installed: Installation | None = None,
    vllm: Path | None = None,
) -> dict[str, str]:
    """Make `folder` an overlay for PYTHONPATH; return the hash of each patch in it.

    Packages are those `installed` (by default for the Python that runs this), or the
    one in the folder `vllm`. A patch is left out where the release needs none, or where
    its package, other than vLLM, is not installed, as is a parameter that no patch has.
    Raises patcher.BlockPatchError if a patch is unknown or does not fit,
    ModuleNotFoundError if there is no vLLM.
    """
    own = installed or installation()
    patches = named_patches(patch_names)
    trees = {}
    for package in dict.fromkeys(patch.package for patch in patches):
        with suppress(*([] if package == "vllm" else [ModuleNotFoundError])):
            place = vllm if vllm and package == "vllm" else own.package(package)
            trees[package] = patcher.Tree(place, only_read=True)
    needed = [
        patch
        for patch in patches
        if patch.package in trees and patch.is_needed(trees[patch.package].version)
    ]
    declared = {name for patch in needed for name in patch.parameters}
    given = {name: value for name, value in parameters.items() if name in declared}
    plans = patcher.plan_imports(needed, given, trees.__getitem__)
    folder.mkdir(parents=True)
    patcher.write_overlay(folder, plans)
    if not IN_CHECKOUT:
        # The wheel may be installed for another Python than vLLM is.
        (folder / "kvtax").symlink_to(PACKAGE)
    return {patch.name: patcher.patch_hash(patch) for patch in needed}


def named_patches(names: Sequence[str]) -> list[patcher.Patch]:
    """Load the patches, or sets of patches, of these names.

    Raises patcher.BlockPatchError if there is none.
    """
    patches = patcher.in_sets(names, patcher.load_sets(PATCHES))
    return patcher.select(patcher.load_patches(PATCHES), patches)
