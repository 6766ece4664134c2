# SPDX-License-Identifier: Apache-2.0
"""The driver that stands in for CUDA's gives memory, and says that all is over."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from kvtax.paths import REPOSITORY

SOURCE = REPOSITORY / "connectors" / "kvbm_without_gpu.c"
OBJECTS = ("cuCtxGetCurrent", "cuStreamCreate", "cuEventCreate", "cuMemPoolCreate")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_driver_gives_memory_that_can_be_written_and_takes_it_back(tmp_path):
    library = tmp_path / "driver.so"
    flags = ["-shared", "-fPIC", "-Wall", "-Werror"]
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE)], check=True)
    driver = ctypes.CDLL(str(library))
    memory = ctypes.c_void_p()
    for allocate in (driver.cuMemHostAlloc, driver.cuMemAllocFromPoolAsync):
        assert allocate(ctypes.byref(memory), ctypes.c_size_t(5_000)) == 0
        ctypes.memset(memory, 1, 5_000)
        assert driver.cuMemFreeHost(memory) == 0
    for make in OBJECTS:
        assert getattr(driver, make)(ctypes.byref(memory)) == 0
        assert memory.value
    assert driver.cuStreamSynchronize(memory) == 0
