# SPDX-License-Identifier: Apache-2.0
"""Records of three servers, shipped to be looked at without a server.

`hash_walk` and `fixed` are of one sweep on two quiet cores: a Mooncake connector that
reads all cached block hashes in every step, and the same with the fixes. `h100` served
a real model on an H100. tools/demo_records.py made the archive.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

RECORDS = Path(__file__).parent / "demo.tar.xz"


def unpack(folder: Path) -> None:
    """Write the records of all servers below `folder`. Raises OSError."""
    # The filters of extractall came with Python 3.11.4; Debian 12 has 3.11.2.
    with tarfile.open(RECORDS) as archive:
        for member in archive:
            if content := archive.extractfile(member):
                file = folder / member.name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content.read())
