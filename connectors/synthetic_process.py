# SPDX-License-Identifier: Apache-2.0
"""A process that works longer the more is cached, beside an engine.

python connectors/synthetic_process.py DESCRIPTOR ENGINE US_PER_1K_BLOCKS
"""

import os
import struct
import subprocess
import sys
import tempfile
import time
from mmap import mmap

PAUSE_S = 0.003
# How many blocks are cached, in the memory that engine and process share.
BLOCKS = struct.Struct("q")


def burn(us: float) -> None:
    """Work for so long by the thread's own clock: not while it is preempted."""
    end_ns = time.thread_time_ns() + us * 1e3
    while time.thread_time_ns() < end_ns:
        pass


def start_process(us_per_1k_blocks: float) -> mmap:
    """Start the process; return the memory in which it finds |cache|."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(BLOCKS.size))
        file.flush()
        shared, number = mmap(file.fileno(), BLOCKS.size), file.fileno()
        command = [sys.executable, __file__, str(number), str(os.getpid())]
        subprocess.Popen([*command, str(us_per_1k_blocks)], pass_fds=[number])
    return shared


def main(descriptor: str, engine: str, us_per_1k_blocks: str) -> None:
    """Work until the engine ends."""
    shared = mmap(int(descriptor), BLOCKS.size)
    while os.getppid() == int(engine):
        time.sleep(PAUSE_S)
        burn(float(us_per_1k_blocks) * BLOCKS.unpack_from(shared)[0] / 1_000)


if __name__ == "__main__":
    main(*sys.argv[1:])
