# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import sys

from hypothesis import HealthCheck, settings

# Many container images forbid Python to keep bytecode. Then each process that a test
# starts would compile its imports anew: seconds where it imports torch.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Our matrices are small. On a busy machine numpy's threads spend several times the
# time of a product waiting for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A stall of the machine is not a fault of what is tested.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
