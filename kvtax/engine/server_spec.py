# SPDX-License-Identifier: Apache-2.0
"""From what is to be served to the command, environment, ports and log of a server."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from kvtax.engine.connector import Connector, needs_company
from kvtax.engine.environment import engine_environment, record_steps
from kvtax.engine.errors import ServerError
from kvtax.engine.installation import Installation, installation
from kvtax.engine.null_model import has_weights
from kvtax.engine.provenance import masked, secrets_in
from kvtax.engine.releases import beside
from kvtax.proc.ports import LOOPBACK, Ports, reserve
from kvtax.records.profile import EngineSettings

SERVED_MODEL = "model"
SERVER = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class Engine:
    """Specification of a server: a connector, a checkpoint folder, and vLLM.

    `installed` is the Python that runs it, with its packages; `overlay` patches them.
    """

    overlay: Path | None
    settings: EngineSettings
    connector: Connector
    model: Path
    installed: Installation = field(default_factory=installation)


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

    def told(self, *arguments: str, **env: str) -> ServerSpec:
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
        shown, hidden = self.argv[: -len(self.arguments)], {}
        for argument in arguments:
            pair = [shown[-1], argument]
            if pair[0].startswith("--") and masked(pair) != pair:
                hidden[shown.pop().removeprefix("--")] = argument
            else:
                shown.append(argument)
        if not hidden or "--config" in shown:
            return self.argv
        file.write_text(json.dumps(hidden))
        return [*shown, "--config", str(file)]


def resolve(
    engine: Engine, folder: Path, label: dict, ports: Ports | None = None
) -> ServerSpec:
    """Describe a server that keeps its log and its step records in `folder`.

    `label` goes into the header of each file of records; `ports` are any free ones
    unless given. Raises ServerError and PortsError.
    """
    if needs_company(engine.connector):
        raise ServerError(
            f"{engine.connector.summary!r} needs a companion, or a folder of its own: "
            "only the sweep and the observatory give it those"
        )
    ports = ports or reserve(1)[0]
    installed = engine.installed
    more = beside(engine.connector.beside, installed)
    env = engine_environment(engine.overlay, engine.settings, ports, installed, more)
    argv = _command(engine, ports)
    own_env = engine.settings.server_env, engine.connector.env
    return ServerSpec(
        argv=argv,
        env=env | engine.connector.env | record_steps(folder, label),
        ports=ports,
        log=folder / "server.log",
        secrets=secrets_in(argv, *own_env),
        # Drivers of GPUs do not all survive a fork.
        starts_cold=engine.settings.flavour == "gpu",
    )


def _command(engine: Engine, ports: Ports) -> list[str]:
    settings = engine.settings
    arguments = {
        "--model": engine.model,
        "--served-model-name": SERVED_MODEL,
        "--host": LOOPBACK,
        "--port": ports.http,
        "--block-size": settings.block_size,
        "--max-model-len": settings.max_model_len,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--max-num-seqs": settings.max_num_seqs,
    }
    if settings.num_blocks is not None:
        arguments["--num-gpu-blocks-override"] = settings.num_blocks
    if settings.tensor_parallel > 1:
        arguments["--tensor-parallel-size"] = settings.tensor_parallel
    if settings.data_parallel > 1:
        arguments["--data-parallel-size"] = settings.data_parallel
    if engine.connector.kv_transfer_config is not None:
        arguments["--kv-transfer-config"] = json.dumps(
            settings.kv_transfer_config | engine.connector.kv_transfer_config
        )
    for name, value in engine.connector.engine_args.items():
        told = value if isinstance(value, str) else json.dumps(value)
        arguments[f"--{name.replace('_', '-')}"] = told
    if not has_weights(engine.model):
        arguments["--load-format"] = "dummy"
    return engine.installed.command(
        "-m",
        SERVER,
        # Prompts are token ids, so no tokenizer is needed, nor any of its time.
        "--skip-tokenizer-init",
        *(str(part) for pair in arguments.items() for part in pair),
        *settings.server_args,
    )
