# SPDX-License-Identifier: Apache-2.0
"""vLLM servers: command, environment, ports and log of each; its start, proved."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kvtax.engine import ServerError
from kvtax.engine.connector import Connector, needs_company
from kvtax.engine.environment import engine_environment, record_steps
from kvtax.engine.installation import Installation, installation
from kvtax.engine.null_model import has_weights
from kvtax.engine.preloaded import Preloaded
from kvtax.engine.provenance import masked, secrets_in
from kvtax.engine.releases import beside
from kvtax.proc.loopback import open_url
from kvtax.proc.ports import LOOPBACK, Ports, listener_pid, reserve
from kvtax.proc.supervise import Supervised
from kvtax.records.profile import EngineSettings

SERVED_MODEL = "model"
SERVER = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class ServerSpec:
    """One server, resolved: nothing else decides what it does.

    It `starts_cold`, or forked from a process that has imported all but vLLM.
    """

    argv: list[str]
    env: dict[str, str]
    ports: Ports
    log: Path
    secrets: list[str] = field(default_factory=list)
    starts_cold: bool = False

    @property
    def arguments(self) -> list[str]:
        """Arguments of vLLM's server."""
        return self.argv[self.argv.index(SERVER) + 1 :]

    def with_options(self, *arguments: str, **env: str) -> ServerSpec:
        """Return the same server with more arguments and environment."""
        return dataclasses.replace(
            self, argv=[*self.argv, *arguments], env=self.env | env
        )

    def private_argv(self, file: Path) -> list[str]:
        """Write the options with secrets to `file`, in YAML; return the other ones.

        All users of a machine see command lines. vLLM reads one such file.
        """
        arguments: list[str] = []
        for argument in self.arguments:
            joined = argument.startswith("--") and masked(argument) != argument
            arguments += argument.split("=", 1) if joined else [argument]
        shown, option = self.argv[: -len(self.arguments)], ""
        hidden: dict[str, list[str]] = {}
        for argument in arguments:
            pair = [shown[-1], argument]
            if option and not argument.startswith("-"):
                hidden[option].append(argument)
            elif pair[0].startswith("--") and masked(pair) != pair:
                option = shown.pop().removeprefix("--")
                hidden[option] = [argument]
            else:
                option = ""
                shown.append(argument)
        if not hidden or "--config" in shown:
            return self.argv
        values = {name: of[0] if len(of) == 1 else of for name, of in hidden.items()}
        file.write_text(json.dumps(values))
        return [*shown, "--config", str(file)]


def resolve(
    connector: Connector,
    settings: EngineSettings,
    model: Path,
    folder: Path,
    label: dict[str, Any],
    overlay: Path | None = None,
    installed: Installation | None = None,
    ports: Ports | None = None,
) -> ServerSpec:
    """Specify a server of `model` that keeps its log and its step records in `folder`.

    `label` goes into the header of each file of records. `overlay` patches the vLLM
    that is `installed`, by default for this Python; `ports` are any free ones unless
    given. Raises ServerError and PortsError.
    """
    if needs_company(connector):
        raise ServerError(
            f"{connector.summary!r} needs a companion, or a folder of its own: "
            "only the sweep and the observatory give it those"
        )
    ports = ports or reserve(1)[0]
    installed = installed or installation()
    more = beside(connector.beside, installed)
    env = engine_environment(overlay, settings, ports, installed, more)
    arguments = _arguments(connector, settings, model, ports)
    # Prompts are token ids, so no tokenizer is needed, nor any of its time.
    argv = installed.command("-m", SERVER, "--skip-tokenizer-init", *arguments)
    return ServerSpec(
        argv=argv,
        env=env | connector.env | record_steps(folder, label),
        ports=ports,
        log=folder / "server.log",
        secrets=secrets_in(argv, settings.server_env, connector.env),
        # Drivers of GPUs do not all survive a fork.
        starts_cold=settings.flavour == "gpu",
    )


def _arguments(
    connector: Connector, settings: EngineSettings, model: Path, ports: Ports
) -> list[str]:
    options: dict[str, Any] = {
        "--model": model,
        "--served-model-name": SERVED_MODEL,
        "--host": LOOPBACK,
        "--port": ports.http,
        "--block-size": settings.block_size,
        "--max-model-len": settings.max_model_len,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--max-num-seqs": settings.max_num_seqs,
    }
    if settings.num_blocks is not None:
        options["--num-gpu-blocks-override"] = settings.num_blocks
    if settings.tensor_parallel > 1:
        options["--tensor-parallel-size"] = settings.tensor_parallel
    if settings.data_parallel > 1:
        options["--data-parallel-size"] = settings.data_parallel
    if connector.kv_transfer_config is not None:
        options["--kv-transfer-config"] = json.dumps(
            settings.kv_transfer_config | connector.kv_transfer_config
        )
    for name, value in connector.engine_args.items():
        text = value if isinstance(value, str) else json.dumps(value)
        options[f"--{name.replace('_', '-')}"] = text
    if not has_weights(model):
        options["--load-format"] = "dummy"
    pairs = [str(part) for pair in options.items() for part in pair]
    return [*pairs, *settings.server_args]


# NIXL takes 100 to 150 s to start when eight instances start at once.
READY_DEADLINE_S = 360.0


class Server:
    """One vLLM server with all its processes. Starts when made."""

    def __init__(self, spec: ServerSpec) -> None:
        self.ports = spec.ports
        self.url = f"http://{LOOPBACK}:{spec.ports.http}"
        self.log = spec.log
        self._began_s = time.monotonic()
        scratch = Path(tempfile.mkdtemp(prefix="kvtax-"))
        argv = spec.private_argv(scratch / "server.yaml")
        files = argv, spec.env, spec.log, scratch, spec.secrets
        self.supervised: Supervised
        if spec.starts_cold:
            self.supervised = Supervised(*files)
            self.cold_start: str | None = "drivers of GPUs do not all survive a fork"
        else:
            self.supervised = forked = Preloaded(*files)
            self.cold_start = forked.cold_start

    def wait_ready(self) -> float:
        """Return the seconds from the start to an answer. Raises ServerError."""
        while (waited_s := time.monotonic() - self._began_s) < READY_DEADLINE_S:
            if self.is_ready():
                return waited_s
            time.sleep(0.1)
        raise ServerError(
            f"vLLM not ready after {READY_DEADLINE_S:.0f} s\n{tail(self.log)}"
        )

    def is_ready(self) -> bool:
        """Return whether the server answers. Raises ServerError if it has ended."""
        if self.supervised.poll() is not None:
            raise ServerError(f"vLLM exited while starting\n{tail(self.log)}")
        if not http_ok(f"{self.url}/health"):
            return False
        self._check_is_ours()
        return True

    def _check_is_ours(self) -> None:
        owner = listener_pid(self.ports.http)
        if owner not in self.supervised.pids():
            raise ServerError(
                f"port {self.ports.http} is answered by process {owner}, "
                "not by our server"
            )

    def pss_mib(self) -> float:
        """Sum of the proportional set sizes (PSS) of all its processes, in MiB.

        Memory that it shares with other servers, and the zygote, counts in part.
        """
        return sum(_pss_kib(pid) for pid in self.supervised.pids()) / 1024

    def cpu_s(self) -> float:
        """Sum of the CPU time of all its processes, in seconds."""
        return sum(_cpu_s(pid) for pid in self.supervised.pids())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.supervised.__exit__(*exc_info)


def http_ok(url: str) -> bool:
    try:
        with open_url(url, 5) as response:
            return response.status == 200
    except OSError:
        return False


def tail(log: Path, lines: int = 25) -> str:
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"--- end of {log}", *text])


def _pss_kib(pid: int) -> int:
    try:
        sums = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) for line in sums.splitlines() if line.startswith("Pss:")
    )


def _cpu_s(pid: int) -> float:
    try:
        return float(sum(psutil.Process(pid).cpu_times()[:2]))
    except psutil.NoSuchProcess:
        return 0.0
