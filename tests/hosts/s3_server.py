# SPDX-License-Identifier: Apache-2.0
"""An object store on this machine, in memory, which refuses writes when told to.

    python -m tests.hosts.s3_server HOST PORT FILE

While FILE is there, it answers each write as S3 does that is too busy.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvtax.proc.supervise import Supervised

READY_S = 300
BUCKET = "results"
LISTENS = "Running on http"
WRITES = ("PUT", "POST")
TOO_BUSY = b"<Error><Code>SlowDown</Code><Message>Please try again</Message></Error>"


class S3Server:
    """The process, with its log and FILE in `folder`."""

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self.endpoint = f"http://{host}:{port}"
        self._folder, self._host, self._port = folder, host, port
        self._busy = folder / "busy"

    def start(self, inside: Callable[..., list[str]] = lambda *command: [*command]):
        """Returns when it listens; `inside` is what a command becomes elsewhere."""
        module = [sys.executable, "-m", "tests.hosts.s3_server"]
        command = inside(*module, self._host, str(self._port), str(self._busy))
        log = self._folder / "s3.log"
        self._process = Supervised(command, dict(os.environ), log)
        deadline_s = time.monotonic() + READY_S
        while LISTENS not in log.read_text(errors="replace"):
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, "the object store does not listen"
            time.sleep(0.1)

    @property
    def environment(self) -> dict[str, str]:
        """What its users have in theirs."""
        return {
            "AWS_ACCESS_KEY_ID": "made",
            "AWS_SECRET_ACCESS_KEY": "up",
            "AWS_DEFAULT_REGION": "us-east-1",
            # That the client tries again is ours to do.
            "AWS_MAX_ATTEMPTS": "1",
            "FSSPEC_S3_ENDPOINT_URL": self.endpoint,
        }

    def refuse(self) -> None:
        self._busy.touch()

    def accept(self) -> None:
        self._busy.unlink()

    def hang(self) -> None:
        for pid in self._process.pids():
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in self._process.pids():
            os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        self._process.stop()


def main() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple
    from werkzeug.wsgi import get_input_stream

    host, port, busy = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    store = DomainDispatcherApplication(create_backend_app)

    def answer(environ, respond):
        if environ["REQUEST_METHOD"] in WRITES and busy.exists():
            get_input_stream(environ).read()
            respond("503 Slow Down", [("Content-Type", "application/xml")])
            return [TOO_BUSY]
        return store(environ, respond)

    run_simple(host, port, answer, threaded=True)


if __name__ == "__main__":
    main()
