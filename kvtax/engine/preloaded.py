# SPDX-License-Identifier: Apache-2.0
"""Commands that are forked from a process which has imported all but vLLM."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO

from kvtax.patcher.import_finder import MODULES
from kvtax.paths import REPOSITORY
from kvtax.proc.supervise import (
    Child,
    Job,
    Process,
    Supervised,
    remove_openmp_segment,
)

# What vLLM 0.18.1 imports, but for 1 % of its modules. One that a release does not
# have, or does not need, costs only time. No library that moves KV, as those read the
# environment of their server.
IMPORTED = """
aiohttp boto3 cachetools cbor2 cloudpickle cpuinfo cv2 diskcache einops fastapi
fastapi.middleware.cors fsspec gguf huggingface_hub._commit_api
huggingface_hub.hf_file_system jinja2.meta llguidance mistral_common
model_hosting_container_standards.sagemaker msgspec multiprocessing.forkserver
multiprocessing.synchronize openai.types.responses openai_harmony
opentelemetry.exporter.otlp.proto.grpc.trace_exporter
opentelemetry.exporter.otlp.proto.http.trace_exporter partial_json_parser psutil
pybase64 pydantic.dataclasses regex requests safetensors.torch setproctitle torch
torch._dynamo.repro.after_dynamo torch._inductor.compile_fx
torch._inductor.standalone_compile torch.distributed._symmetric_memory
torch.utils.cpp_extension torchvision transformers
transformers.generation.logits_process transformers.models.auto.image_processing_auto
transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
transformers.models.siglip transformers.models.whisper.tokenization_whisper
transformers.video_processing_utils uvicorn uvloop xgrammar.testing zmq.asyncio
"""
# As vLLM sets them before it imports torch.
AS_VLLM = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
# Variables that no module reads which a zygote imports. Commands that differ in others
# are forked from different zygotes.
UNREAD = (
    *("DIRECT_READ_", "KVTAX_", "LMCACHE_", "MC_", "MOONCAKE_", "NIXL_", "PROMETHEUS_"),
    *("PYTEST_", "PYTHONPATH", "TMPDIR", "UCX_", "VLLM_"),
)
# Seconds after which a signal is heeded at the latest.
ANSWER_POLL_S = 0.2
# Seconds that a zygote has to end by itself.
END_S = 0.3
# A zygote has 0.6 GiB; ports and connectors differ without need of another.
MOST_ZYGOTES = 2


class Preloaded(Supervised):
    """A Supervised `python -m module` of this Python, forked from a zygote.

    Where that is impossible it starts cold: its log and `cold_start` say why.
    """

    cold_start: str | None = None

    def _start(self, job: Job, owner: IO[str], output: IO[bytes]) -> Process:
        if job.command[:2] != [sys.executable, "-m"]:
            self.cold_start = "it runs another Python than this one"
            return super()._start(job, owner, output)
        try:
            return Child(_zygote(job.env).fork(job, owner, output))
        except ZygoteError as error:
            self.cold_start = str(error)
            output.write(f"kvtax: started cold: {error}\n".encode())
            output.flush()
            return super()._start(job, owner, output)


class ZygoteError(Exception):
    """A zygote did not fork; the message says why."""


class Zygote:
    """A zygote of this process; it imports from when it is made."""

    def __init__(self, env: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        alive, ours = os.pipe()
        self._alive = os.fdopen(ours)
        with theirs, os.fdopen(alive):
            descriptors = [theirs.fileno(), alive]
            command = [sys.executable, "-m", "kvtax.engine.zygote"]
            self._process = subprocess.Popen(
                [*command, *map(str, descriptors), *IMPORTED.split()],
                env=env,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=descriptors,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, job: Job, owner: IO[str], output: IO[bytes]) -> int:
        """Have `job` supervised by a child of this process; return its process id.

        Raises ZygoteError.
        """
        with tempfile.TemporaryFile("w+") as file, self._lock:
            json.dump(asdict(job), file)
            file.seek(0)
            ends = [file.fileno(), owner.fileno(), output.fileno()]
            try:
                socket.send_fds(self._requests, [b"f"], ends)
                # A signal may reach another thread, which does not wake this one.
                while not select.select([self._requests], [], [], ANSWER_POLL_S)[0]:
                    continue
                answer = self._requests.recv(1 << 16)
            except OSError:
                answer = b""
        if not answer:
            raise ZygoteError(f"the zygote has ended: {self._last_line()}")
        if isinstance(pid := json.loads(answer), int):
            return pid
        raise ZygoteError(pid)

    def _last_line(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return (lines or [f"status {status}"])[-1]

    def end(self) -> None:
        """End the zygote; what it has forked goes on."""
        self._requests.close()
        self._alive.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # it is within a long import
            self._process.kill()
            self._process.wait()
        remove_openmp_segment(self._process.pid)


zygotes: dict[tuple[tuple[str, str], ...], Zygote] = {}
__zygotes_lock = threading.Lock()


def _zygote(env: dict[str, str]) -> Zygote:
    """Find the zygote for commands with this environment, or start it."""
    path = env.get("PYTHONPATH", "").split(os.pathsep)
    shared = {name: env[name] for name in sorted(env) if not name.startswith(UNREAD)}
    # Each command runs its own overlay.
    path = [entry for entry in path if not Path(entry, MODULES).exists()]
    shared |= AS_VLLM | {"PYTHONPATH": os.pathsep.join(path)}
    key = tuple(shared.items())
    with __zygotes_lock:
        zygote = zygotes.pop(key, None)
        if zygote and not zygote.is_alive():
            zygote.end()
            zygote = None
        zygotes[key] = zygote = zygote or Zygote(shared)
        while len(zygotes) > MOST_ZYGOTES:
            zygotes.pop(next(iter(zygotes))).end()
    return zygote


def zygote_pids() -> set[int]:
    """Return the ids of this process's zygotes, which outlive what they forked."""
    return {zygote.pid for zygote in zygotes.values()}


@atexit.register
def end_all() -> None:
    """End the zygotes of this process."""
    while zygotes:
        zygotes.popitem()[1].end()


# A fork of the owner has none: what they fork would not become its child.
os.register_at_fork(after_in_child=zygotes.clear)
