# SPDX-License-Identifier: Apache-2.0
"""What a host made, as it comes from there: a folder in a tar file."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path


def unpack(packed: bytes, aside: Path) -> Path:
    """The folder, as a new one in `aside`."""
    made = Path(tempfile.mkdtemp(dir=aside)) / "made"
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(made, filter="data")
    return made
