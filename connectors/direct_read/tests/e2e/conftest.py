# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from connectors.direct_read.bench.gated_servers import GatedServer, direct_read_overlay
from tests.harness.tiny import Reference, TinyServers, ready

from .bench import SMALL_BLOCKS, ReadBench


@pytest.fixture(scope="package")
def bench(lab: TinyServers, reference: Reference) -> Iterator[ReadBench]:
    overlay = direct_read_overlay(lab)
    elsewhere = shutil.copytree(lab.checkpoint, lab.folder / "elsewhere")
    with ready(
        GatedServer(lab, overlay, "read_a", num_blocks=SMALL_BLOCKS, multi=True),
        GatedServer(lab, overlay, "read_b", checkpoint=elsewhere),
        GatedServer(
            lab,
            overlay,
            "read_foreign",
            checkpoint=lab.other_weights,
            num_blocks=SMALL_BLOCKS,
            name_of_model="foreign",
        ),
    ) as instances:
        yield ReadBench(*instances, reference)
