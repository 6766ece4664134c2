# SPDX-License-Identifier: Apache-2.0
"""A vLLM with a tiny checkpoint: random weights, but each token hangs on the prompt.

A transfer that loses or mixes up KV can only show in the tokens if these depend on
it. Two things see to that: query and key norms of SHARPNESS give attention scores a
spread of SHARPNESS squared, so that each head picks a few tokens out of thousands
rather than their mean, and a prompt token has nothing but attention to be heard by.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvtax.engine.connector import Connector
from kvtax.engine.installation import Installation, installation
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.engine.overlay import build_overlay
from kvtax.engine.server import SERVED_MODEL, Server, resolve
from kvtax.proc.supervise import signal_all
from kvtax.records.profile import EngineSettings

# To collect tests takes no torch.
if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 512
MAX_TOKENS = 8192
SHARPNESS = 2.0

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_TOKENS,
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **SIZES,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    # Rounding differs between a prefill and a decode; float32 keeps it below the gap
    # between the best two tokens.
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_checkpoint(folder: Path, seed: int) -> Path:
    """`folder` with config.json and model.safetensors; the seed decides the weights."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids, uniform over the vocabulary."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (tokens,), generator=generator).tolist()


def _weights(seed: int) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # Rows of unit expected norm: what comes in with unit variance leaves with it.
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    head = SIZES["head_dim"]
    queries = SIZES["num_attention_heads"] * head
    keys = SIZES["num_key_value_heads"] * head
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, hidden) * hidden**0.5,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCAB_SIZE, hidden),
    }
    for layer in range(SIZES["num_hidden_layers"]):
        in_layer = {
            "input_layernorm.weight": torch.ones(hidden),
            "post_attention_layernorm.weight": torch.ones(hidden),
            "self_attn.q_proj.weight": matrix(queries, hidden),
            "self_attn.k_proj.weight": matrix(keys, hidden),
            "self_attn.v_proj.weight": matrix(keys, hidden),
            "self_attn.o_proj.weight": matrix(hidden, queries) * 2,
            "self_attn.q_norm.weight": torch.full((head,), SHARPNESS),
            "self_attn.k_norm.weight": torch.full((head,), SHARPNESS),
            "mlp.gate_proj.weight": matrix(inner, hidden),
            "mlp.up_proj.weight": matrix(inner, hidden),
            "mlp.down_proj.weight": matrix(hidden, inner),
        }
        weights |= {f"model.layers.{layer}.{name}": w for name, w in in_layer.items()}
    return weights


BLOCK_TOKENS = 16
NUM_BLOCKS = 1024
ANSWER_TOKENS = 16
# Until an answer, or a state, that never comes is given up: far longer than the longest
# wait of the connectors (Mooncake's D gives up after 68 s), on a slow machine, too.
REQUEST_TIMEOUT_S = 600.0
SETTLE_DEADLINE_S = 120.0
# States in /proc/net/tcp.
ESTABLISHED, LISTEN = "01", "0A"

Tokens = list[int]


class RequestFailed(Exception):
    """The server answered with an error, or broke the connection off."""


@dataclass(frozen=True)
class Answer:
    tokens: Tokens
    kv_transfer_params: dict[str, Any] | None


@dataclass(frozen=True)
class Counters:
    """/metrics: prompt tokens by their source so far, and what is held now.

    The latter is as of the last engine step that put something out.
    """

    pulled_tokens: int
    computed_tokens: int
    cached_tokens: int
    running: int
    waiting: int
    used_blocks: int

    def __sub__(self, before: Counters) -> Counters:
        mine, theirs = vars(self), vars(before)
        return Counters(**{name: mine[name] - theirs[name] for name in mine})


def tiny_settings(
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int = NUM_BLOCKS,
    block_tokens: int = BLOCK_TOKENS,
) -> EngineSettings:
    """Build a float32 engine for the tiny checkpoint, on one core."""
    return msgspec.structs.replace(
        CPU_ENGINE,
        num_blocks=num_blocks,
        block_size=block_tokens,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_model_len,
        max_num_seqs=max_num_seqs,
        server_args=[*CPU_ENGINE.server_args, "--dtype", "float32"],
        server_env=CPU_ENGINE.server_env | {"OMP_NUM_THREADS": "1"},
    )


class TinyServer(Server):
    """Starts when made; leaving its context stops it."""

    def __init__(
        self,
        folder: Path,
        overlay: Path | None,
        checkpoint: Path,
        kv_transfer_config: dict[str, Any] | None,
        env: dict[str, str],
        max_num_seqs: int,
        installed: Installation,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        folder.mkdir()
        connector = Connector("", [], kv_transfer_config=kv_transfer_config)
        settings = tiny_settings(MAX_TOKENS, max_num_seqs, block_tokens=block_tokens)
        spec = resolve(
            connector,
            settings,
            checkpoint,
            folder,
            {},
            overlay=overlay,
            installed=installed,
        )
        super().__init__(spec.with_options(**env))
        self.bootstrap_url = f"http://127.0.0.1:{self.ports.bootstrap}"

    async def complete(
        self,
        prompt: Tokens,
        max_tokens: int = ANSWER_TOKENS,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> Answer:
        """Return the whole greedy answer; or raise RequestFailed. Cancelling aborts."""
        body = {
            "model": SERVED_MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = kv_transfer_params
        url = f"{self.url}/v1/completions"
        try:
            async with _session() as session, session.post(url, json=body) as response:
                if response.status != 200:
                    text = await response.text()
                    raise RequestFailed(f"{response.status}: {text}")
                answer = await response.json()
        except aiohttp.ClientError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        choice = answer["choices"][0]
        if choice["finish_reason"] != "length":
            raise RequestFailed(f"finish_reason is {choice['finish_reason']!r}")
        return Answer(choice["token_ids"], answer.get("kv_transfer_params"))

    async def counters(self) -> Counters:
        """Raise RequestFailed if the server is gone."""
        url = f"{self.url}/metrics"
        try:
            async with _session() as session, session.get(url) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        values = {
            (sample.name, sample.labels.get("source")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        by_source = "vllm:prompt_tokens_by_source_total"
        # One block is never given out, and not counted.
        used_blocks = values["vllm:kv_cache_usage_perc", None] * (NUM_BLOCKS - 1)
        return Counters(
            pulled_tokens=int(values[by_source, "external_kv_transfer"]),
            computed_tokens=int(values[by_source, "local_compute"]),
            cached_tokens=int(values[by_source, "local_cache_hit"]),
            running=int(values["vllm:num_requests_running", None]),
            waiting=int(values["vllm:num_requests_waiting", None]),
            used_blocks=round(used_blocks),
        )

    async def settle(self) -> None:
        """Wait until no request and no block is held, and everything is counted.

        An idle engine makes no steps, so it neither learns that a transfer has ended
        nor shows new figures: a prompt of one token makes it do a few. Raises
        AssertionError after SETTLE_DEADLINE_S.
        """
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        while True:
            await self.complete([0], max_tokens=2)
            held = await self.counters()
            if held.running == held.waiting == held.used_blocks == 0:
                return
            assert time.monotonic() < deadline, f"still held: {held}"
            await asyncio.sleep(0.1)

    async def has(self, **held: int) -> None:
        """Wait until the counters named are as given, or raise AssertionError."""
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        while not held.items() <= vars(seen := await self.counters()).items():
            assert time.monotonic() < deadline, f"{held} expected: {seen}"
            await asyncio.sleep(0.05)

    async def has_unread(self, count: int) -> None:
        """Wait until so many bytes that were sent to it are still unread."""
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        while (unread := unread_bytes(self.supervised.pids())) < count:
            assert time.monotonic() < deadline, f"only {unread} bytes unread"
            await asyncio.sleep(0.01)

    def kill(self) -> None:
        signal_all(self.supervised.pids(), signal.SIGKILL)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """All its processes under SIGSTOP."""
        pids = self.supervised.pids()
        signal_all(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            signal_all(pids, signal.SIGCONT)


async def aborted(request: asyncio.Task) -> None:
    """Wait until the client has closed the connection of a request under way."""
    assert request.cancel()
    with suppress(asyncio.CancelledError):
        await request


@asynccontextmanager
async def occupied(instance: TinyServer, count: int) -> AsyncIterator[None]:
    """`count` long answers under way: as many as `instance` takes at once."""
    long = [
        asyncio.create_task(instance.complete([number] * 8, max_tokens=8000))
        for number in range(count)
    ]
    try:
        await instance.has(running=count)
        yield
    finally:
        for answer in long:
            answer.cancel()
        await asyncio.gather(*long, return_exceptions=True)


def unread_bytes(pids: list[int]) -> int:
    """Count unread bytes of the connections to their ports, accepted or not."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(link))
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows += [row.split() for row in Path(table).read_text().splitlines()[1:]]
    # Fields: 1 is address:port, 3 the state, 4 tx:rx bytes, 9 the inode.
    listening = {
        row[1].rpartition(":")[2]
        for row in rows
        if row[3] == LISTEN and f"socket:[{row[9]}]" in sockets
    }
    return sum(
        int(row[4].rpartition(":")[2], 16)
        for row in rows
        if row[3] == ESTABLISHED and row[1].rpartition(":")[2] in listening
    )


@asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield session


KV_TRANSFER: dict[str, dict[str, str | dict[str, str]]] = {
    "mooncake": {
        "kv_connector": "MooncakeConnector",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    },
    "nixl": {"kv_connector": "NixlConnector"},
}
# Without these, Mooncake does not start on a CPU, NIXL finds no blocks, and threads of
# NIXL and vLLM that are idle take a core each.
NEEDED = [
    "mooncake_cpu_layout",
    "nixl_cpu_layout",
    "nixl_progress_delay",
    "nixl_cu13_progress_delay",
    "cpu_uniproc",
]
FIXES = [
    "block_pool_delta_listener",
    "mooncake_get_finished_short_circuit",
    "kv_transfer_abort_race",
]


class TinyServers:
    """A folder with vLLM patched and not, and two checkpoints; starts instances.

    vLLM is that of `installed`, by default of the Python that runs this. The attention
    of later releases for CPUs wants blocks of 32 tokens.
    """

    def __init__(
        self,
        folder: Path,
        installed: Installation | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.folder = folder
        self.installed = installed or installation()
        self.block_tokens = block_tokens
        self.checkpoint = write_checkpoint(folder / "checkpoint", seed=1)
        self.other_weights = write_checkpoint(folder / "other_weights", seed=2)
        self._overlays = {False: folder / "unpatched", True: folder / "patched"}
        for patched, overlay in self._overlays.items():
            patches = NEEDED + FIXES if patched else NEEDED
            build_overlay(overlay, patches, {"DELAY_US": 500}, self.installed)
        self._started = 0

    def instance(
        self,
        connector: str | None = None,
        kv_role: str = "kv_both",
        *,
        patched: bool = False,
        checkpoint: Path | None = None,
        on_load_failure: str = "fail",
        max_num_seqs: int = 32,
        env: dict[str, str] | None = None,
    ) -> TinyServer:
        """Begin to start an instance; `connector` None is plain vLLM."""
        config = None
        if connector is not None:
            config = KV_TRANSFER[connector] | {
                "kv_role": kv_role,
                "kv_load_failure_policy": on_load_failure,
            }
        self._started += 1
        return TinyServer(
            self.folder / f"instance{self._started}",
            self._overlays[patched],
            checkpoint or self.checkpoint,
            config,
            env or {},
            max_num_seqs,
            self.installed,
            self.block_tokens,
        )


Starting = TypeVar("Starting", bound=TinyServer)


@contextmanager
def ready(*starting: Starting) -> Iterator[tuple[Starting, ...]]:
    """Yield the instances once all of them answer; all are stopped on leaving."""
    with ExitStack() as stack:
        for instance in starting:
            stack.enter_context(instance)
        for instance in starting:
            instance.wait_ready()
        yield starting


class Reference:
    """The tokens that a single instance without a connector answers with."""

    def __init__(self, single: TinyServer) -> None:
        self._single = single
        self._known: dict[tuple[int, ...], Tokens] = {}

    async def tokens(self, prompts: list[Tokens]) -> list[Tokens]:
        missing = [prompt for prompt in prompts if tuple(prompt) not in self._known]
        answers = await asyncio.gather(*map(self._single.complete, missing))
        for prompt, answer in zip(missing, answers, strict=True):
            self._known[tuple(prompt)] = answer.tokens
        return [self._known[tuple(prompt)] for prompt in prompts]
