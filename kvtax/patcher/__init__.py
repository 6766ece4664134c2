# SPDX-License-Identifier: Apache-2.0
"""Apply and revert source patches to an installed Python package, exactly.

    patches = load_patches("patches")
    tree = Tree("/path/to/copy/vllm")        # or locate("vllm", target_dir)
    apply(tree, [patches["step_timing_v2"]], {"delay_us": 100})
    revert(tree, ["step_timing_v2"])         # the identical bytes and modes again

Or apply them to modules as they are imported, the tree untouched: at_import.py.

Standard library only. A refusal is a BlockPatchError and leaves the tree untouched.
"""

from .at_import import (
    ImportPlan,
    never_imported,
    plan_imports,
    python_path,
    write_overlay,
)
from .choice import active_blocks
from .engine import PatchStatus, apply, check, diff, revert, status
from .errors import (
    AnchorError,
    BlockPatchError,
    CompileError,
    ConflictError,
    DamagedError,
    LockedError,
    ManifestError,
    ParameterError,
    TargetError,
    UnfinishedError,
    WriteError,
)
from .journal import pending, settle
from .manifest import in_sets, load_patch, load_patches, load_sets, select
from .patch import Patch, Release, load_releases, patch_hash
from .plan import Change, Plan
from .target import Tree, find_package, locate

__all__ = [
    "AnchorError",
    "BlockPatchError",
    "Change",
    "CompileError",
    "ConflictError",
    "DamagedError",
    "ImportPlan",
    "LockedError",
    "ManifestError",
    "ParameterError",
    "Patch",
    "PatchStatus",
    "Plan",
    "Release",
    "TargetError",
    "Tree",
    "UnfinishedError",
    "WriteError",
    "active_blocks",
    "apply",
    "check",
    "diff",
    "find_package",
    "in_sets",
    "load_patch",
    "load_patches",
    "load_releases",
    "load_sets",
    "locate",
    "never_imported",
    "patch_hash",
    "pending",
    "plan_imports",
    "python_path",
    "revert",
    "select",
    "settle",
    "status",
    "write_overlay",
]
