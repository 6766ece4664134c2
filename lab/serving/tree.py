# SPDX-License-Identifier: Apache-2.0
"""A private copy of an installed package, with a config's patches applied.

The copy shares the files' data with the installed package through hard links, which
takes milliseconds. Patches replace files by rename, so the installed package, and
the package cache it may itself be linked to, keep every byte.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import blockpatch
from lab.paths import PATCHES
from lab.serving.installation import Installation, installation


def link_package(package: Path, destination: Path) -> None:
    """Hard-link a package folder and its bundled shared libraries beside it.

    Wheels keep those in a sibling folder that the extensions find relatively.
    """
    siblings = [package]
    siblings += package.parent.glob(f"{package.name}.libs")
    siblings += package.parent.glob(f".{package.name}.*.libs")
    for folder in siblings:
        shutil.copytree(
            folder, destination / folder.name, copy_function=_link, symlinks=True
        )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM):
            raise
        shutil.copy2(source, target)


def build_tree(
    destination: Path,
    base: Path,
    patch_names: list[str],
    parameters: dict[str, object],
    installed: Installation | None = None,
) -> dict[str, str]:
    """Make `destination` a folder for PYTHONPATH: patched packages, vllm among them.

    vllm is taken from `base`, other packages from where they are `installed` (by
    default for the Python that runs this). A patch is left out where the release needs
    none. Returns the hash of each patch that is in. Raises blockpatch.BlockPatchError
    if one is unknown or does not fit, ModuleNotFoundError if its package is missing.
    """
    patches = blockpatch.load_patches(PATCHES)
    if unknown := [name for name in patch_names if name not in patches]:
        raise blockpatch.BlockPatchError(
            f"no patch named {unknown[0]!r}; there are: {', '.join(sorted(patches))}"
        )
    wanted = [patches[name] for name in patch_names]
    destination.mkdir(parents=True)
    link_package(base, destination)
    for package in sorted({patch.package for patch in wanted} - {"vllm"}):
        link_package((installed or installation()).package(package), destination)
    packages = sorted({patch.package for patch in wanted})
    trees = {package: blockpatch.Tree(destination / package) for package in packages}
    needed = [
        patch for patch in wanted if patch.is_needed(trees[patch.package].version)
    ]
    for package, tree in trees.items():
        for_package = [patch for patch in needed if patch.package == package]
        declared = {name for patch in for_package for name in patch.parameters}
        blockpatch.apply(
            tree,
            for_package,
            {name: value for name, value in parameters.items() if name in declared},
        )
    return {patch.name: blockpatch.patch_hash(patch) for patch in needed}
