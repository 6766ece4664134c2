# SPDX-License-Identifier: Apache-2.0
"""Choice of the blocks of a patch by the code of a tree, whatever its version.

Blocks of one id are forms of one change: exactly one must fit. ``optional`` blocks of
one name come together where all of them fit, and are left out elsewhere.
"""

from collections.abc import Sequence

from .anchors import Source
from .blocks import Ours, parse
from .errors import AnchorError, TargetError
from .patch import BlockSpec, Patch
from .target import Tree


def active_blocks(tree: Tree, patch: Patch, ours: Ours = None) -> list[BlockSpec]:
    """Select the blocks of ``patch`` for this tree. Raises BlockPatchError on a misfit.

    A block without an alternative is not looked up here: it must fit.
    """
    _require_release(tree, patch)
    groups: dict[str, dict[str, list[BlockSpec]]] = {}
    for spec in patch.blocks:
        ids = groups.setdefault(spec.optional or "", {})
        ids.setdefault(spec.id, []).append(spec)
    sources: dict[str, Source] = {}
    chosen: set[BlockSpec] = set()
    for group, ids in groups.items():
        picked: list[BlockSpec] = []
        misfits: list[str] = []
        for forms in ids.values():
            if not group and len(forms) == 1 and not forms[0].given:
                picked += forms
                continue
            misfit_of = {spec: _misfit(tree, spec, sources, ours) for spec in forms}
            fitting = [spec for spec, misfit in misfit_of.items() if not misfit]
            if len(fitting) > 1:
                raise AnchorError(_refusal(tree, patch, forms, len(fitting), ""))
            if not fitting:
                reasons = "; ".join(dict.fromkeys(misfit_of.values()))
                misfits.append(_refusal(tree, patch, forms, 0, f": {reasons}"))
            picked += fitting
        if misfits and not group:
            raise AnchorError(misfits[0])
        if not misfits:
            chosen.update(picked)
    if patch.blocks and not chosen:
        raise TargetError(
            f"patch {patch.name} has no block for {tree.title}; "
            "the patch does not fit this release"
        )
    return [spec for spec in patch.blocks if spec in chosen]


def _misfit(tree: Tree, spec: BlockSpec, sources: dict[str, Source], ours: Ours) -> str:
    """Return why the block does not fit the tree, empty if it does."""
    places = [spec.given] if spec.given else []
    for file, scope, anchor in [*places, (spec.file, spec.scope, spec.anchor)]:
        if file not in sources:
            text = tree.read(file)
            if text is None:
                return f"{file}: no such file"
            sources[file] = Source(parse(text, file, ours).lines, file)
        try:
            sources[file].find(scope, anchor)
        except AnchorError as error:
            return str(error)
    return ""


def _refusal(
    tree: Tree, patch: Patch, forms: Sequence[BlockSpec], fitting: int, reasons: str
) -> str:
    return (
        f"{fitting} of {len(forms)} forms of block {patch.name}:{forms[0].id} fit "
        f"{tree.title}, exactly one must{reasons}; the patch "
        "does not fit this release"
    )


def _require_release(tree: Tree, patch: Patch) -> None:
    if patch.package != tree.package:
        raise TargetError(
            f"patch {patch.name} is for package {patch.package}, not {tree.package}"
        )
    if tree.version is None and (patch.since or patch.before_version):
        raise TargetError(
            f"patch {patch.name} depends on the version of {tree.package}, and "
            f"{tree.root} does not state it (no _version.py, no metadata beside it)"
        )
    if not patch.is_needed(tree.version):
        since = patch.since and f"from {patch.since} on"
        before = patch.before_version and f"before {patch.before_version}"
        when = " and ".join(filter(None, (since, before)))
        raise TargetError(
            f"patch {patch.name} is needed {when} only, and this is {tree.package} "
            f"{tree.version}: leave it out"
        )
