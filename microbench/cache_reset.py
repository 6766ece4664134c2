# SPDX-License-Identifier: Apache-2.0
"""Reset the prefix cache of an idle server, and verify the reset.

vLLM resets only when no block is in use, and up to 0.22.1 answers 200 either way. A
probe prompt is therefore cached first; after the reset it must miss. The probe leaves a
few blocks in the cache.
"""

from __future__ import annotations

import asyncio
from time import monotonic, perf_counter_ns

import aiohttp
import msgspec
import numpy as np

from kvtax.load.plan import PROBE, Plan, completion_body

# Four blocks of 128 tokens, the largest default block size, and the one token that
# is always computed.
PROBE_TOKENS = 513
# A connector may hold blocks a little longer than the requests that filled them.
RESET_TIMEOUT_S = 10.0
RETRY_EVERY_S = 0.2
METRICS_TIMEOUT_S = 2.0
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


class ResetError(Exception):
    """The prefix cache was not reset, or the reset could not be verified."""


async def reset_prefix_cache(
    session: aiohttp.ClientSession, url: str, plan: Plan
) -> int:
    """Reset, and return the time (ns) of the answer to the effective reset.

    Raises ResetError after RESET_TIMEOUT_S of answers other than 200 or of resets
    that left the probe in the cache, and at once where no reset can be verified.
    """
    try:
        async with asyncio.timeout(RESET_TIMEOUT_S + plan.request_timeout_s):
            return await _verified_reset(session, url, plan)
    except TimeoutError:
        raise ResetError("the server does not answer") from None
    except aiohttp.ClientError as error:
        raise ResetError(f"{type(error).__name__}: {error}") from error


async def _verified_reset(session: aiohttp.ClientSession, url: str, plan: Plan) -> int:
    probe = _Probe(session, url, plan)
    await probe.hit_tokens()
    if not await probe.hit_tokens():
        raise ResetError(
            f"a reset cannot be verified: {probe.tokens} tokens sent twice "
            "did not hit the prefix cache (is it on, and a block no larger than that?)"
        )
    give_up_s = monotonic() + RESET_TIMEOUT_S
    while True:
        failure = await _post_reset(session, url)
        reset_ns = perf_counter_ns()
        if failure is None:
            if not await probe.hit_tokens():
                return reset_ns
            failure = "200, but what was cached still hits: blocks are in use"
        if monotonic() > give_up_s:
            raise ResetError(f"/reset_prefix_cache answered {failure}")
        await asyncio.sleep(RETRY_EVERY_S)


async def _post_reset(session: aiohttp.ClientSession, url: str) -> str | None:
    """Request a reset; return the fault in the answer, None if there is none."""
    async with session.post(f"{url}/reset_prefix_cache") as response:
        body = await response.read()
    if response.status == 404:
        raise ResetError("no /reset_prefix_cache: set VLLM_SERVER_DEV_MODE=1 there")
    if response.status != 200:
        return f"{response.status}: {body[:200].decode(errors='replace')}"
    # Later releases answer {"success": bool}.
    if body and msgspec.json.decode(body).get("success") is False:
        return "success: false"
    return None


class _Probe:
    """Prompt whose prefix-cache hits are read from /metrics."""

    def __init__(self, session: aiohttp.ClientSession, url: str, plan: Plan) -> None:
        rng = np.random.default_rng([PROBE, plan.seed])
        # No longer than what a request of the plan may grow to.
        longest = plan.prompt_tokens + plan.output_tokens - 1
        self.tokens = min(PROBE_TOKENS, longest)
        prompt = rng.integers(1, plan.vocab_size, self.tokens).tolist()
        self._body = completion_body(plan.model, prompt, 1)
        self._session = session
        self._url = url

    async def hit_tokens(self) -> int:
        """Send the probe; return how many of its tokens the server had cached."""
        before = await self._counters()
        async with self._session.post(
            f"{self._url}/v1/completions",
            data=self._body,
            headers={"Content-Type": "application/json"},
        ) as response:
            answer = await response.read()
        if response.status != 200:
            raise ResetError(f"probe failed: HTTP {response.status}: {answer[:200]!r}")
        give_up_s = monotonic() + METRICS_TIMEOUT_S
        while True:
            queries, hits = np.subtract(await self._counters(), before)
            if queries >= self.tokens:
                return int(hits)
            if monotonic() > give_up_s:
                raise ResetError(f"{QUERIES} in /metrics does not count the probe")
            await asyncio.sleep(0.01)

    async def _counters(self) -> list[float]:
        async with self._session.get(f"{self._url}/metrics") as response:
            text = await response.text()
        lines = text.splitlines()
        return [
            sum(float(line.split()[-1]) for line in lines if line.startswith(name))
            for name in (QUERIES, HITS)
        ]
