# SPDX-License-Identifier: Apache-2.0
"""vLLM's own prefix cache and publisher of KV events, with and without an engine.

    python cache_engine.py EVENTS REPLAY BLOCKS BLOCK_TOKENS ALGORITHM
    python cache_engine.py EVENTS REPLAY BLOCKS BLOCK_TOKENS MODEL

Reads a command per line, as JSON, and answers each with a line: how many batches have
been published, and what was asked. The cache is that of an engine: KVCacheManager, as
the scheduler calls it; or the whole engine runs MODEL, a folder with a config.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count
from typing import Any

import torch
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request

MAX_MODEL_LEN = 4096
# Tokens of a whole engine's requests: its few blocks have to hold one.
MODEL_LEN = 1024


class CacheEngine:
    """The prefix cache of an engine, and the publisher beside it."""

    def __init__(
        self, events: str, replay: str, blocks: int, block_tokens: int, algorithm: str
    ) -> None:
        spec = FullAttentionSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config, MAX_MODEL_LEN, block_tokens, enable_kv_cache_events=True
        )
        hash_fn = get_hash_fn_by_name(algorithm)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(block_tokens, hash_fn)
        self._numbers = count()
        self._running: list[Request] = []
        self._publisher = ZmqEventPublisher(0, events, replay, buffer_steps=10_000)
        self._published = 0

    def request(
        self, ids: list[int], salt: str | None = None, lora: str | None = None
    ) -> Request:
        sampling = SamplingParams(max_tokens=100)
        sampling.update_from_generation_config({}, eos_token_id=-1)
        return Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=ids,
            sampling_params=sampling,
            pooling_params=None,
            lora_request=LoRARequest(lora, 1, "/adapter") if lora else None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )

    def run(self, prompt: dict[str, Any], output: list[int], stay: bool) -> bool:
        """Prefill, decode, and free unless it is to `stay`; False without room."""
        request = self.request(**prompt)
        blocks, computed, *_ = self.manager.get_computed_blocks(request)
        new = request.num_tokens - computed
        if self.manager.allocate_slots(request, new, computed, blocks) is None:
            self.manager.free(request)
            return False
        request.num_computed_tokens = request.num_tokens
        for token in output:
            request.append_output_token_ids(token)
            if self.manager.allocate_slots(request, 1) is None:
                break
            request.num_computed_tokens += 1
        self._running.append(request)
        if not stay:
            self.free()
        return True

    def free(self) -> None:
        """All that stayed."""
        for request in self._running:
            self.manager.free(request)
        self._running = []

    def computed(self, prompt: dict[str, Any]) -> int:
        """What vLLM would not compute again, in tokens."""
        return self.manager.get_computed_blocks(self.request(**prompt))[1]

    def reset(self) -> bool:
        return self.manager.reset_prefix_cache()

    def publish(self) -> int:
        """Publish what has happened; return how many batches were published so far."""
        if made := self.manager.take_events():
            self._publisher.publish(KVEventBatch(ts=time.time(), events=made))
            self._published += 1
        return self._published


class ModelEngine:
    """A whole vLLM: its scheduler decides what is cached, and it publishes."""

    def __init__(
        self, events: str, replay: str, blocks: int, block_tokens: int, model: str
    ) -> None:
        from vllm import LLM

        llm = self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            enforce_eager=True,
            max_model_len=MODEL_LEN,
            max_num_batched_tokens=256,
            block_size=block_tokens,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=True,
            **cache_states(model),
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events,
                "replay_endpoint": replay,
            },
        )
        core = llm.llm_engine.engine_core.engine_core
        self.manager = core.scheduler.kv_cache_manager
        self._hasher = core.request_block_hasher
        self._published = 0
        publisher = core.scheduler.kv_event_publisher
        self._publish = publisher.publish
        publisher.publish = self._count

    def _count(self, batch: KVEventBatch) -> None:
        self._published += 1
        self._publish(batch)

    def publish(self) -> int:
        """Return how many batches the engine has published."""
        return self._published

    def run(self, prompt: dict[str, Any], output: list[int], stay: bool) -> bool:
        """Prefill, and decode as many tokens as `output` has, whatever they are."""
        sampling = SamplingParams(
            max_tokens=1 + len(output), temperature=0, ignore_eos=True, detokenize=False
        )
        asked = {"prompt_token_ids": prompt["ids"], "cache_salt": prompt.get("salt")}
        self._llm.generate([asked], sampling, use_tqdm=False)
        return True

    def free(self) -> list[str]:
        """Return the kinds of the groups of layers; there is nothing to free."""
        groups = self.manager.kv_cache_config.kv_cache_groups
        return [type(group.kv_cache_spec).__name__ for group in groups]

    def computed(self, prompt: dict[str, Any]) -> int:
        """What vLLM would not compute again, in tokens."""
        request = Request(
            request_id="asked",
            prompt_token_ids=prompt["ids"],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=prompt.get("salt"),
            block_hasher=self._hasher,
        )
        return self.manager.get_computed_blocks(request)[1]

    def reset(self) -> bool:
        return self._llm.reset_prefix_cache()


def cache_states(model: str) -> dict[str, str]:
    """What vLLM has to be told where layers keep a state."""
    with open(os.path.join(model, "config.json")) as file:
        layers = json.load(file)["layer_types"]
    return {"mamba_cache_mode": "align"} if "conv" in layers else {}


def main() -> None:
    # What others print goes elsewhere.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    events, replay, blocks, block_tokens, kind = sys.argv[1:]
    size = int(blocks), int(block_tokens)
    if os.path.isdir(kind):
        engine = ModelEngine(events, replay, *size, kind)
    else:
        engine = CacheEngine(events, replay, *size, kind)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("do"):
            case "run":
                answer = engine.run(**command)
            case "free":
                answer = engine.free()
            case "reset":
                engine.free()
                answer = engine.reset()
            case "computed":
                answer = [engine.computed(one) for one in command["prompts"]]
        print(json.dumps([engine.publish(), answer]), file=answers, flush=True)


if __name__ == "__main__":
    main()
