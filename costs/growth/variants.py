# SPDX-License-Identifier: Apache-2.0
"""A patched module of vLLM twice in one process: as it was before, and as it is."""

from __future__ import annotations

import importlib.util
import sys
from itertools import count
from pathlib import Path
from types import ModuleType

from blockpatch.blocks import parse, render

_numbers = count()


def before_and_after(name: str, edit: tuple[str, str] | None = None):
    """The module `name` without the blocks of its patches, and with them.

    `edit` is something wrong, for tests: a text of the second, and what replaces it.
    """
    path = Path(importlib.util.find_spec(name).origin)
    lines, blocks = parse(path.read_bytes())
    if not blocks:
        raise RuntimeError(f"{path} is not patched")
    after = render(lines, blocks).decode()
    if edit:
        assert after.count(edit[0]) == 1, edit
        after = after.replace(*edit)
    return _module(name, render(lines, []).decode(), path), _module(name, after, path)


def _module(name: str, source: str, path: Path) -> ModuleType:
    """A new module: no variant runs code that another one has warmed up."""
    module = ModuleType(f"{name}_{next(_numbers)}")
    # Dataclasses look their module up there.
    sys.modules[module.__name__] = module
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    return module
