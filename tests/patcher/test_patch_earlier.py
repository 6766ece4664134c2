# SPDX-License-Identifier: Apache-2.0
"""Trees that earlier versions of kvtax patched come back to the byte.

earlier_trees.json has, by commit, the files of the synthetic package (as Latin-1) that
this version changed or added when it applied alpha, beta, gamma and delta.
"""

import itertools
import json
from pathlib import Path

import pytest

from kvtax.patcher import apply, check, revert, status
from tests.patcher.patchlab import snapshot

TREES = json.loads(Path(__file__).with_name("earlier_trees.json").read_text())
NAMES = ["alpha", "beta", "delta", "gamma"]


@pytest.fixture(params=TREES)
def earlier(request, tree):
    """The tree of an earlier version, and what it was before that."""
    before = snapshot(tree.root)
    for path, text in TREES[request.param].items():
        place = tree.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode("latin-1"))
    return tree, before


def test_all_patches_are_seen_and_come_out_in_any_order(earlier):
    tree, before = earlier
    patched = {path: content for path, (_, content) in snapshot(tree.root).items()}
    assert {name: found.state for name, found in status(tree).items()} == dict.fromkeys(
        NAMES, "applied"
    )
    for order in itertools.permutations(NAMES):
        for count, name in enumerate(order, 1):
            assert set(revert(tree, [name]).left) == set(order[count:])
        assert snapshot(tree.root) == before
        for path, content in patched.items():
            if content is None:
                (tree.root / path).mkdir(exist_ok=True)
            else:
                (tree.root / path).write_bytes(content)


def test_to_apply_again_brings_a_tree_up_to_date(earlier, patches):
    tree, before = earlier
    chosen = [patches[name] for name in NAMES]
    apply(tree, chosen)
    text = b"".join(content or b"" for _, content in snapshot(tree.root).values())
    assert b"sha256:" not in text and b"order=" not in text
    assert check(tree, chosen).changes == ()
    revert(tree, NAMES)
    assert snapshot(tree.root) == before


def test_an_edit_of_an_earlier_block_is_seen(earlier, patches):
    tree, _ = earlier
    place = tree.root / "scheduler.py"
    place.write_bytes(place.read_bytes().replace(b"alpha_out = 4", b"alpha_out = 5"))
    assert status(tree, patches.values())["alpha"].state == "edited"
