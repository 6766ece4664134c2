# SPDX-License-Identifier: Apache-2.0
"""Refusals of the patcher; each message names the cause, the place and the remedy."""


class BlockPatchError(Exception):
    """Base of all refusals: the tree is as it was."""

    exit_code = 2


class ManifestError(BlockPatchError):
    """A patch folder is wrong in itself."""


class ParameterError(BlockPatchError):
    """A parameter is unknown, or its value is no plain Python literal."""


class TargetError(BlockPatchError):
    """No such package or file at the target, or the tree cannot be written."""


class AnchorError(BlockPatchError):
    """A scope or anchor matches no statement, or more than one."""


class ConflictError(BlockPatchError):
    """Two patches want the same lines, or the same file with other content."""


class DamagedError(BlockPatchError):
    """A block in the tree was edited by hand, or half a sentinel is left."""


class CompileError(BlockPatchError):
    """The patched file would not be valid Python."""


class LockedError(BlockPatchError):
    """Another process is changing this tree: a call of ours, or an editor."""


class UnfinishedError(BlockPatchError):
    """A killed call left a change, which must be finished first or was given up."""


class WriteError(BlockPatchError):
    """The system refused a write (disk full, permission); all changes were undone."""
