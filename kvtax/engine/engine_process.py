# SPDX-License-Identifier: Apache-2.0
"""Processes that are asked over a Unix socket, such as an engine core.

Several of them live side by side, and whoever measures lets one at a time work.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

from kvtax.engine import ServerError
from kvtax.engine.environment import engine_environment, record_steps
from kvtax.engine.installation import Installation, installation
from kvtax.engine.null_model import CPU_ENGINE, Forward, write_null_model
from kvtax.engine.overlay import build_overlay
from kvtax.engine.preloaded import Preloaded
from kvtax.engine.server import tail
from kvtax.proc.ports import reserve
from kvtax.proc.supervise import Supervised

READY_DEADLINE_S = 180.0
EXIT_GRACE_S = 10.0
ENDED = "ended with status"


class WorkerProcess:
    """`python -m <worker> *arguments socket`, which calls serve.

    It ends with the block, or when this process ends. `kind` starts it.
    """

    kind: type[Supervised] = Supervised

    def __init__(
        self,
        folder: Path,
        worker: str,
        *arguments: str,
        env: dict[str, str],
        installed: Installation | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._socket = folder / "log", folder / "socket"
        module = ["-m", worker, *arguments, str(self._socket)]
        command = (installed or installation()).command(*module)
        self._process = self.kind(command, env, self._log, secrets=secrets)
        self._connection: Connection | None = None

    def wait_ready(self) -> None:
        """Wait for the worker. Raises ServerError with its log's end if it fails."""
        deadline = time.monotonic() + READY_DEADLINE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self._connection = Client(str(self._socket))
                return
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.1)
        status = self._process.poll()
        why = (
            f" in {READY_DEADLINE_S:g} s"
            if status is None
            else f", but {ENDED} {status}"
        )
        raise ServerError(f"the worker did not start{why}\n{tail(self._log)}")

    def ask(self, *request: Any, timeout_s: float | None = None) -> Any:
        """Call a function of the worker.

        Raises ServerError if it ends, or does not answer for `timeout_s`.
        """
        if self._connection is None:
            raise RuntimeError("the worker is asked before wait_ready")
        try:
            self._connection.send(request)
            if not self._connection.poll(timeout_s):
                raise ServerError(f"the worker hangs: no answer for {timeout_s:g} s")
            return self._connection.recv()
        except (EOFError, ConnectionError):
            status = self._process.wait(EXIT_GRACE_S)
            ending = f"the worker {ENDED} {status}"
            raise ServerError(f"{ending}\n{tail(self._log)}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._connection is not None:
            self._connection.close()
            if exc_info == (None, None, None):
                # It ends by itself now, and writes the last of its records.
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(EXIT_GRACE_S)
        self._process.__exit__(*exc_info)


class EngineProcess(WorkerProcess):
    """A worker with vLLM: `python -m <worker> model *arguments socket`.

    Its vLLM is the `installed` one with `patches`, whose hashes are `patch_hashes`. The
    null model has a context of `max_model_len` tokens. In `beside` are more packages.
    The log has `***` for `secrets`.
    """

    kind = Preloaded

    def __init__(
        self,
        folder: Path,
        worker: str,
        patches: list[str],
        *arguments: str,
        recording: bool = False,
        records_env: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        forward_us: int = 0,
        installed: Installation | None = None,
        max_model_len: int = CPU_ENGINE.max_model_len,
        beside: Path | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        records, overlay = folder / "records", folder / "overlay"
        records.mkdir(parents=True)
        installed = installed or installation()
        model = write_null_model(folder / "model", max_model_len, Forward(forward_us))
        self.patch_hashes = build_overlay(overlay, patches, {}, installed)
        ports = reserve(1)[0]
        full = engine_environment(overlay, CPU_ENGINE, ports, installed, beside)
        full |= env or {}
        # One thread: less that differs between processes.
        full |= {"OMP_NUM_THREADS": "1"}
        if recording:
            full |= record_steps(records, {}) | (records_env or {})
        super().__init__(
            folder,
            worker,
            str(model.folder),
            *arguments,
            env=full,
            installed=installed,
            secrets=secrets,
        )


def serve(subject: Any, socket: str, *functions: Callable[..., Any]) -> None:
    """Answer requests in the worker, (name, *arguments), until the parent goes away.

    Each is answered with what the function of that name gives for the subject.
    """
    calls = {function.__name__: function for function in functions}
    with Listener(socket) as listener, listener.accept() as parent:
        while True:
            try:
                name, *arguments = parent.recv()
            except EOFError:
                return
            parent.send(calls[name](subject, *arguments))
