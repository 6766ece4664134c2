# SPDX-License-Identifier: Apache-2.0
"""Cache engines and a kvindexd as processes that can be killed, and asked."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kvtax.engine.environment import cpu_preload
from kvtax.engine.installation import Installation

from kvtax_fleet.instances import write_instances
from kvtax_fleet.launch.kvindexd import HASH_SEED, KVINDEXD, Program, build
from kvtax_fleet.records.instances import Instance

ENGINE = Path(__file__).parent / "cache_engine.py"
DEADLINE_S = 30.0
# An engine of which no part is in another process.
ONE_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "KMP_BLOCKTIME": "1",
}
needs_go = pytest.mark.skipif(not shutil.which("go"), reason="needs Go 1.25")


class Engine:
    """A cache_engine.py; `published` counts the batches of its events.

    It runs in this environment, or in that of another vLLM `release`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *settings: str,
        seed: str = HASH_SEED,
        release: Installation | None = None,
    ):
        self.name = name
        self.events = f"ipc://{folder}/{name}"
        self.replay = f"{self.events}.replay"
        self._settings = settings
        self._seed = seed
        self._release = release
        self.published = 0
        self.start()

    @property
    def instance(self) -> Instance:
        return Instance(
            self.name,
            f"http://{self.name}",
            kv_events=self.events,
            kv_events_replay=self.replay,
        )

    def start(self) -> None:
        """It begins to start; the first command waits until it has."""
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        env |= {"PYTHONHASHSEED": self._seed, "VLLM_CONFIGURE_LOGGING": "0"}
        python = sys.executable
        if self._release is not None:
            python = self._release.python
            env |= ONE_PROCESS | {"LD_PRELOAD": ":".join(cpu_preload(self._release))}
        self._process = subprocess.Popen(
            [python, ENGINE, self.events, self.replay, *self._settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._ready = False

    def __call__(self, do: str, **arguments: Any) -> Any:
        if not self._ready:
            assert self._process.stdout.readline() == "ready\n"
            self._ready = True
        self._process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self._process.stdin.flush()
        self.published, answer = json.loads(self._process.stdout.readline())
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Index:
    """A kvindexd, or what answers like it, that follows engines, on a Unix socket."""

    def __init__(
        self,
        engines: list[Engine],
        folder: Path,
        *flags: str,
        program: Program = KVINDEXD,
    ) -> None:
        instances = folder / "instances.json"
        write_instances(instances, [one.instance for one in engines])
        self._engines = engines
        self._socket = folder / f"{program.name}.sock"
        self._log = folder / f"{program.name}.log"
        self._command = [
            build(program),
            "-instances",
            instances,
            "-hash-seed",
            HASH_SEED,
        ]
        self._command += ["-listen", f"unix://{self._socket}", *flags]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout.readline() == f"{self.address}\n"

    @property
    def address(self) -> str:
        return f"unix://{self._socket}"

    def stop(self) -> int:
        self._process.terminate()
        return self._process.wait(DEADLINE_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str):
        """(status, the answer's body)."""
        connection = http.client.HTTPConnection("localhost", timeout=DEADLINE_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self._socket))
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def tokens(self, prompts: list[dict[str, Any]]) -> dict[str, list[int]]:
        """By instance, the leading tokens held of each prompt."""
        asked = [
            {"token_ids": one["ids"], "cache_salt": one.get("salt") or ""}
            | {"lora": one.get("lora") or ""}
            for one in prompts
        ]
        body = json.dumps({"prompts": asked}).encode()
        status, answer = self.ask("POST", "/v1/lookup", body)
        assert status == 200, answer
        found: dict[str, list[int]] = {}
        for one in json.loads(answer)["answers"]:
            for holding in one["instances"]:
                found.setdefault(holding["name"], []).append(holding["tokens"])
        return found

    def instances(self) -> dict[str, dict[str, Any]]:
        """What /healthz says of each."""
        status, answer = self.ask("GET", "/healthz")
        assert status == 200
        return {one["name"]: one for one in json.loads(answer)["instances"]}

    def wait(self) -> None:
        """Until every event of every engine has been taken."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = self.instances()
            if all(
                found[one.name]["connected"]
                and found[one.name]["next_batch"] == one.published
                for one in self._engines
            ):
                return
            log = self._log.read_text()
            assert time.monotonic() < deadline, f"{found}\n{log}"
            time.sleep(0.01)
