# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from costs.direct_read.engines import GatedServer, direct_read_tree
from lab.tiny.servers import Reference, TinyServers, ready

from .bench import ReadBench
from .scenarios import SMALL_BLOCKS


@pytest.fixture(scope="package")
def bench(lab: TinyServers, reference: Reference) -> Iterator[ReadBench]:
    tree = direct_read_tree(lab)
    elsewhere = shutil.copytree(lab.checkpoint, lab.folder / "elsewhere")
    with ready(
        GatedServer(lab, tree, "read_a", num_blocks=SMALL_BLOCKS, multi=True),
        GatedServer(lab, tree, "read_b", checkpoint=elsewhere),
        GatedServer(
            lab,
            tree,
            "read_foreign",
            checkpoint=lab.other_weights,
            num_blocks=SMALL_BLOCKS,
            name_of_model="foreign",
        ),
    ) as instances:
        yield ReadBench(*instances, reference)
