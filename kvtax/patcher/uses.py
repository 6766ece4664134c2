# SPDX-License-Identifier: Apache-2.0
"""Check of a patch that must see every use of a name: ``[[only]]`` in its manifest.

    [[only]]
    name = "_cache"
    within = "cached_block_hash_to_block"    # optional: files that have this text
    why = "a change made elsewhere would go unreported"
    uses = { "v1/core/block_pool.py:BlockHashToBlockMap.insert" = 3 }

A use is the name as a variable, an attribute, an import or a string. With ``methods``
it is what may change the object: the name assigned or deleted, an item of it, another
method, a second name for it. More uses than stated, or one elsewhere, are refused: the
package does something that the patch does not know.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence

from .anchors import DEFINITIONS, Source
from .blocks import Ours, Parsed, read
from .errors import TargetError
from .patch import Only, Patch
from .target import Tree


def require_only(tree: Tree, patch: Patch, ours: Ours = None) -> None:
    """Raise TargetError for a use that the patch does not know."""
    for only in patch.only:
        text = (only.within or only.name).encode()
        for path, content in sorted(tree.scan(text).items()):
            file = read(content, path, ours)
            if isinstance(file, Parsed):
                _require(tree, patch, only, Source(file.lines, path))


def _require(tree: Tree, patch: Patch, only: Only, source: Source) -> None:
    counts: Counter[str] = Counter()
    for scope, line in _uses(source.tree, only, ""):
        counts[scope] += 1
        if counts[scope] > only.uses.get(f"{source.file}:{scope}", 0):
            verb = "uses" if only.methods is None else "may change"
            raise TargetError(
                f"{source.file}:{line}: {scope or 'the module'} {verb} {only.name}, "
                f"which patch {patch.name} does not know: {only.why}; the patch does "
                f"not fit this {tree.package}"
            )


def _uses(node: ast.AST, only: Only, scope: str) -> Iterator[tuple[str, int]]:
    """Yield the scope and the line of each use below `node`."""
    for child in ast.iter_child_nodes(node):
        if _is_use(child, only):
            yield scope, getattr(child, "lineno", 0)
        name = [child.name] if isinstance(child, DEFINITIONS) else []
        yield from _uses(child, only, ".".join([*filter(None, [scope]), *name]))


def _is_use(node: ast.AST, only: Only) -> bool:
    if only.methods is not None:
        return _may_change(node, only.name, only.methods)
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == only.name
        case ast.alias(name=name) | ast.Constant(value=name):
            return name == only.name
    return False


def _may_change(node: ast.AST, name: str, methods: Sequence[str]) -> bool:
    match node:
        case ast.Name(id=own, ctx=context) | ast.Attribute(attr=own, ctx=context):
            if own == name and not isinstance(context, ast.Load):
                return True
    match node:
        case ast.Subscript(value=of, ctx=ast.Store() | ast.Del()):
            return _is_named(of, name)
        case ast.Attribute(value=of, attr=method):
            return _is_named(of, name) and method not in methods
        case ast.Assign(value=of) | ast.AnnAssign(value=of) | ast.NamedExpr(value=of):
            return _is_named(of, name)
    return False


def _is_named(node: ast.AST | None, name: str) -> bool:
    match node:
        case ast.Name(id=own) | ast.Attribute(attr=own):
            return own == name
    return False
