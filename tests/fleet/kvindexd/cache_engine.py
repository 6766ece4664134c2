# SPDX-License-Identifier: Apache-2.0
"""vLLM's own prefix cache and publisher of KV events, without an engine around them.

    python cache_engine.py EVENTS REPLAY BLOCKS BLOCK_TOKENS ALGORITHM

Reads a command per line, as JSON, and answers each with a line: how many batches have
been published, and what was asked. The cache is that of an engine: KVCacheManager, as
the scheduler calls it.
"""

from __future__ import annotations

import json
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


class CacheEngine:
    def __init__(self, blocks: int, block_tokens: int, algorithm: str) -> None:
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


def main() -> None:
    events, replay, blocks, block_tokens, algorithm = sys.argv[1:]
    engine = CacheEngine(int(blocks), int(block_tokens), algorithm)
    publisher = ZmqEventPublisher(0, events, replay, buffer_steps=10_000)
    published = 0
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("do"):
            case "run":
                answer = engine.run(**command)
            case "free":
                answer = engine.free()
            case "reset":
                engine.free()
                answer = engine.manager.reset_prefix_cache()
            case "computed":
                answer = [engine.computed(one) for one in command["prompts"]]
        if made := engine.manager.take_events():
            publisher.publish(KVEventBatch(ts=time.time(), events=made))
            published += 1
        print(json.dumps([published, answer]), flush=True)
    publisher.shutdown()


if __name__ == "__main__":
    main()
