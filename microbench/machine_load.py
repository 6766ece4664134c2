# SPDX-License-Identifier: Apache-2.0
"""Other work of a machine while a server is measured."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import psutil

from kvtax.engine.server import Server
from kvtax.records.run import MachineLoad


class Clocks(NamedTuple):
    """Clocks of the machine and of this run, in s."""

    wall: float
    cores: float
    steal: float
    processes: float
    ours: float

    @classmethod
    def read(cls, server: Server) -> Clocks:
        """Read them; the driver and the peer count once they have ended."""
        all_cores = psutil.cpu_times()
        return cls(
            wall=time.monotonic(),
            cores=sum(all_cores[:8]),  # without guests, whose time is in `user`
            steal=all_cores.steal,
            processes=all_cores.user + all_cores.nice + all_cores.system,
            ours=sum(os.times()[:4]) + server.cpu_s(),
        )

    def load_until(self, end: Clocks) -> MachineLoad:
        """Compute the load between two readings."""
        spent = Clocks(
            *(after - before for before, after in zip(self, end, strict=True))
        )
        others_s = max(spent.processes - spent.ours, 0.0)
        return MachineLoad(
            cores=psutil.cpu_count(),
            seconds=round(spent.wall, 3),
            steal_share=round(spent.steal / spent.cores, 5),
            others_cores=round(others_s / spent.wall, 4),
        )
