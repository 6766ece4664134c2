# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM's OpenAI server from a private tree and proves that it is fresh."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from lab.paths import REPOSITORY
from lab.serving.connector import Connector
from lab.serving.supervise import Supervised
from microbench.profile import Profile

# NIXL takes 100 to 150 s to start when eight instances start at once.
READY_DEADLINE_S = 360.0
SERVED_MODEL = "model"
# The same block hashes in all servers, and sets in the same order.
HASH_SEED = "0"


class ServerError(Exception):
    """The server did not start, or is not the one we started."""


class Server:
    """One vLLM server process tree; `log` gets its output."""

    def __init__(
        self,
        tree: Path,
        profile: Profile,
        connector: Connector,
        model: Path,
        records: Path,
        label: dict,
        log: Path,
        ports: list[int] | None = None,
    ) -> None:
        ports = ports or free_ports(3)
        self.port, self.nixl_port, self.bootstrap_port = ports
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.supervised = Supervised(
            command(profile, connector, model, self.port),
            environment(
                tree, profile, records, label, [self.nixl_port, self.bootstrap_port]
            )
            | connector.env,
            log,
        )

    def wait_ready(self) -> float:
        """Seconds until the server answered. Raises ServerError."""
        started = time.monotonic()
        while (waited_s := time.monotonic() - started) < READY_DEADLINE_S:
            if self.supervised.poll() is not None:
                raise ServerError(f"vLLM exited while starting\n{tail(self.log)}")
            if http_ok(f"{self.url}/health"):
                self._check_is_ours()
                return waited_s
            time.sleep(0.1)
        raise ServerError(
            f"vLLM not ready after {READY_DEADLINE_S:.0f} s\n{tail(self.log)}"
        )

    def _check_is_ours(self) -> None:
        owner = listener_pid(self.port)
        if owner not in self.supervised.pids():
            raise ServerError(
                f"port {self.port} is answered by process {owner}, not by our server"
            )

    def peak_rss_mib(self) -> float:
        """Sum of the peak resident memory of all its processes, in MiB."""
        return sum(_peak_rss_kib(pid) for pid in self.supervised.pids()) / 1024

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.supervised.stop()


def command(
    profile: Profile, connector: Connector, model: Path, port: int
) -> list[str]:
    arguments = {
        "--model": model,
        "--served-model-name": SERVED_MODEL,
        "--host": "127.0.0.1",
        "--port": port,
        "--block-size": profile.block_size,
        "--num-gpu-blocks-override": profile.num_blocks,
        "--max-model-len": profile.max_model_len,
        "--max-num-batched-tokens": profile.max_num_batched_tokens,
        "--max-num-seqs": profile.max_num_seqs,
    }
    if connector.kv_transfer_config is not None:
        arguments["--kv-transfer-config"] = json.dumps(
            profile.kv_transfer_config | connector.kv_transfer_config
        )
    if not any(model.glob("*.safetensors")):
        arguments["--load-format"] = "dummy"
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        # Prompts are token ids, so no tokenizer is needed, nor any of its time.
        "--skip-tokenizer-init",
        *(str(part) for pair in arguments.items() for part in pair),
        *profile.server_args,
    ]


def environment(
    tree: Path, profile: Profile, records: Path, label: dict, side_ports: list[int]
) -> dict[str, str]:
    env = dict(os.environ)
    plugin = Path(__file__).with_name("vllm_plugin")
    env |= {
        "PYTHONPATH": os.pathsep.join(map(str, (tree, plugin, REPOSITORY))),
        "KVTAX_STEP_RECORDS_DIR": str(records),
        "KVTAX_STEP_RECORDS_LABEL": json.dumps(label),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONHASHSEED": HASH_SEED,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_ports[0]),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(side_ports[1]),
    }
    if profile.flavour == "cpu":
        env["LD_PRELOAD"] = os.pathsep.join(cpu_preload())
    return env | profile.server_env


def cpu_preload() -> list[str]:
    """The two libraries without which vLLM's CPU worker refuses to start."""
    cache = subprocess.run(
        ["ldconfig", "-p"], capture_output=True, text=True, check=True
    ).stdout
    tcmalloc = [
        line.split()[-1] for line in cache.splitlines() if "libtcmalloc_m" in line
    ]
    exact = [path for path in tcmalloc if path.endswith("libtcmalloc_minimal.so.4")]
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    if not exact or not openmp.exists():
        raise ServerError(
            "libtcmalloc_minimal.so.4 or the environment's libiomp5.so is missing: "
            "run setup.sh"
        )
    return [exact[0], str(openmp)]


def free_ports(count: int) -> list[int]:
    """Distinct ports that were free on the loopback interface a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()


def http_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def listener_pid(port: int) -> int | None:
    """The process that listens on a TCP port of this host, as /proc tells."""
    wanted = f":{port:04X}"
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(wanted) and fields[3] == "0A":  # LISTEN
            inodes.add(f"socket:[{fields[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) in inodes:
                return int(link.parts[2])
        except OSError:
            continue
    return None


def tail(log: Path, lines: int = 25) -> str:
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"--- end of {log}", *text])


def _peak_rss_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0
