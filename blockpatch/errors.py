# SPDX-License-Identifier: Apache-2.0
"""Every way the engine says no. Each message says what, where and what to do."""


class BlockPatchError(Exception):
    """Base of all refusals; whatever raised it left the tree as it was."""


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
    """Somebody else is changing this tree: a call with that pid, or an editor."""


class UnfinishedError(BlockPatchError):
    """A killed call left a change: it must be finished first, or was given up."""


class WriteError(BlockPatchError):
    """The system refused a write (disk full, permission); all was undone."""
