# SPDX-License-Identifier: Apache-2.0
"""A nvidia-smi for machines without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

H100 = "0, NVIDIA H100 80GB HBM3, 81559, 4"


def path_with_gpus(folder: Path, *lines: str, script: str = "") -> str:
    """A PATH whose nvidia-smi prints `lines`, or runs `script`."""
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir(exist_ok=True)
    script = script or "\n".join(f"echo '{line}'" for line in lines)
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    return f"{smi.parent}{os.pathsep}{os.environ['PATH']}"
