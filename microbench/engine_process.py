# SPDX-License-Identifier: Apache-2.0
"""A process with an engine core on a private patched tree, asked over a Unix socket.

Several of them live side by side, and whoever measures lets one at a time work.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import msgspec

from microbench.config import load_profile
from microbench.model import write_model
from microbench.server import environment, free_ports, tail
from microbench.supervise import Supervised
from microbench.tree import build_tree, installed_package

READY_DEADLINE_S = 180.0


class EngineProcess:
    """`python -m <worker> model socket *arguments`, which calls overhead_worker.serve.

    It ends with the block, or when this process ends. `patch_hashes` are its tree's.
    """

    def __init__(
        self,
        folder: Path,
        worker: str,
        patches: list[str],
        *arguments: str,
        recording: bool = False,
    ) -> None:
        self._log, self._socket = folder / "log", folder / "socket"
        records, tree = folder / "records", folder / "tree"
        records.mkdir(parents=True)
        profile = msgspec.structs.replace(load_profile("cpu"), forward_us=0)
        model, _ = write_model(folder / "model", profile)
        self.patch_hashes = build_tree(tree, installed_package("vllm"), patches, {})
        env = environment(tree, profile, records, {}, free_ports(2))
        # One thread, and the same hashes: less that differs between processes.
        env |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        if not recording:
            del env["KVTAX_STEP_RECORDS_DIR"]
        command = [sys.executable, "-m", worker, str(model), str(self._socket)]
        self._process = Supervised([*command, *arguments], env, self._log)
        self._connection: Connection | None = None

    def wait_ready(self) -> None:
        """Raises RuntimeError with the end of its log if it does not start."""
        deadline = time.monotonic() + READY_DEADLINE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self._connection = Client(str(self._socket))
                return
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.1)
        raise RuntimeError(f"the engine did not start\n{tail(self._log)}")

    def ask(self, *request: Any) -> Any:
        """The answer of a function of the worker. Raises RuntimeError."""
        try:
            self._connection.send(request)
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"the engine died\n{tail(self._log)}") from None

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._connection is not None:
            self._connection.close()
        self._process.stop()
