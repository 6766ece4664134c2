# SPDX-License-Identifier: Apache-2.0
"""The checkpoint folder is whole at any time, for whoever reads it at that time."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from kvtax.engine.null_model import write_null_model
from kvtax.engine.settings import Forward

TIMES = 100


def test_who_reads_while_it_is_made_again_reads_it_whole(tmp_path: Path) -> None:
    """Each run of an experiment makes it, and servers of others are starting then."""
    folder = tmp_path / "model"
    write_null_model(folder, 4096, Forward(0))

    def make_again() -> None:
        for _ in range(TIMES):
            write_null_model(folder, 4096, Forward(0))

    writer = threading.Thread(target=make_again)
    writer.start()
    reads = 0
    while writer.is_alive():
        read = json.loads((folder / "config.json").read_text())
        assert read["max_position_embeddings"] == 4096
        reads += 1
    writer.join()
    assert reads
