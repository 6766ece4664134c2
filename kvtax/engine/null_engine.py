# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine core on the null model, in this process, stepped by its caller.

The process must have the overlay that it is to measure or test on its path.
"""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
MAX_MODEL_LEN = 8_192
MAX_REQUESTS = 64


class NullEngine:
    """An engine core in this process, one request scheduler and one worker.

    `kv_transfer` is vLLM's --kv-transfer-config, `engine_args` are further fields of
    its EngineArgs. With `null_device` forwards run beside the host, and "async" has
    vLLM schedule ahead of them. Prompts are token ids, outputs the null model's zeros.
    """

    def __init__(
        self,
        model: Path,
        kv_transfer: dict[str, Any] | None,
        num_blocks: int = 8_000,
        max_model_len: int = MAX_MODEL_LEN,
        max_requests: int = MAX_REQUESTS,
        executor: type[Executor] | None = None,
        null_device: Literal["sync", "async"] | None = None,
        **engine_args: Any,
    ) -> None:
        # As their class, not as JSON, which is what the command line takes.
        if events := engine_args.get("kv_events_config"):
            engine_args["kv_events_config"] = KVEventsConfig(**events)
        if null_device:
            engine_args["worker_cls"] = "kvtax_null_model.device.NullDeviceWorker"
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            # Later releases refuse a length that the blocks cannot hold; one is kept.
            max_model_len=min(max_model_len, (num_blocks - 1) * BLOCK_SIZE),
            max_num_batched_tokens=8_192,
            max_num_seqs=max_requests,
            # It makes one of a dict, which its declaration does not say.
            kv_transfer_config=cast(KVTransferConfig | None, kv_transfer),
            **engine_args,
        ).create_engine_config()
        if null_device == "async":
            # Not as an argument: the CPU's platform refuses it.
            config.scheduler_config.async_scheduling = True
        executor = executor or Executor.get_class(config)
        self.core = EngineCore(config, executor, log_stats=False)
        self._num_blocks = num_blocks
        self._ids = count()

    def add(
        self,
        prompt: list[int],
        output_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> str:
        """Queue a request that ends after exactly `output_tokens`; its id."""
        request = request_of(
            str(next(self._ids)), prompt, output_tokens, kv_transfer_params, time.time()
        )
        self.core.add_request(*self.core.preprocess_add_request(request))
        return str(request.request_id)

    def run_to_end(self) -> None:
        """Step until nothing is left to do."""
        while self.core.scheduler.has_requests():
            self.core.step()

    def decode_batch(self, batch: int, steps: int) -> list[str]:
        """Prefill `batch` requests and leave at least `steps` decode-only steps.

        Raises ValueError if they do not fit into the engine.
        """
        tokens = PROMPT_TOKENS + steps + 2
        blocks = batch * -(-tokens // BLOCK_SIZE)
        if tokens > MAX_MODEL_LEN or batch > MAX_REQUESTS or blocks >= self._num_blocks:
            raise ValueError(
                f"{batch} requests of {tokens} tokens do not fit: at most "
                f"{MAX_REQUESTS} of {MAX_MODEL_LEN}, {self._num_blocks} blocks in all"
            )
        first = next(self._ids)
        ids = [
            # Prompts that share no block, or the first would serve the others.
            self.add(_numbered(first + row), steps + 2)
            for row in range(batch)
        ]
        self.core.step()
        return ids

    def end_batch(self, ids: list[str]) -> None:
        """Abort the requests and forget their blocks: all rounds start alike."""
        self.core.abort_requests(ids)
        self.run_to_end()
        if not self.core.scheduler.reset_prefix_cache():
            raise RuntimeError("the prefix cache has blocks of requests that ended")

    def time(self, steps: int) -> list[float]:
        """us of that many engine steps, taken around EngineCore.step()."""
        step, clock = self.core.step, time.perf_counter_ns
        times = []
        for _ in range(steps):
            before = clock()
            step()
            times.append((clock() - before) / 1e3)
        return times

    def time_starts(self, steps: int, output_tokens: int) -> list[float]:
        """us of that many steps with the request that starts in each.

        Each ends after `output_tokens`, so as many run at once.
        """
        core, clock = self.core, time.perf_counter_ns
        times = []
        for _ in range(steps):
            number = next(self._ids)
            request = core.preprocess_add_request(
                request_of(
                    str(number), _numbered(number), output_tokens, None, time.time()
                )
            )
            before = clock()
            core.add_request(*request)
            core.step()
            times.append((clock() - before) / 1e3)
        return times


def request_of(
    request_id: str,
    prompt: list[int],
    output_tokens: int,
    kv_transfer_params: dict[str, Any] | None,
    arrival_s: float,
) -> EngineCoreRequest:
    """Make a request that ends after exactly `output_tokens`."""
    extra = kv_transfer_params and {"kv_transfer_params": kv_transfer_params}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, extra_args=extra
        ),
        pooling_params=None,
        arrival_time=arrival_s,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def cached_tokens(output: EngineCoreOutput) -> tuple[int, int] | None:
    """Prompt tokens of the request that were cached, and how many of them elsewhere.

    None if this output does not say: in later releases only a request's first one does.
    """
    if not hasattr(output, "prefill_stats"):
        return output.num_cached_tokens, output.num_external_computed_tokens
    if (stats := output.prefill_stats) is None:
        return None
    return stats.num_cached_tokens, stats.num_external_cached_tokens


def _numbered(number: int) -> list[int]:
    """Make one prompt for each number below a million, from the first block on."""
    high, low = divmod(number, 1_000)
    return [high + 1, low + 1] * (PROMPT_TOKENS // 2)
