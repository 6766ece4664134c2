# SPDX-License-Identifier: Apache-2.0
"""A connector's scheduler side before and after a fix, in vLLM's real scheduler.

Both get the same calls over random requests: they arrive, are computed in chunks,
preempted, resumed, loaded and saved late, finished and aborted.
"""

from __future__ import annotations

import traceback
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.harness.before_after import Twin, before_and_after
from tests.harness.scheduler_alone import BLOCK_SIZE, LoneScheduler, Subject

THOROUGH = settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
# The first failure is enough.
QUICK = settings(
    THOROUGH, max_examples=60, phases=[Phase.generate], report_multiple_bugs=False
)

ARRIVAL = st.tuples(
    st.just("add"),
    st.integers(0, 3),  # which prompts share a prefix
    st.integers(1, 5 * BLOCK_SIZE),  # prompt tokens
    st.integers(1, 6 * BLOCK_SIZE),  # output tokens
)
STEP = st.tuples(st.just("step"), st.booleans(), st.integers(1, 24))
ABORT = st.tuples(st.just("abort"), st.integers(0, 99))
EVENTS = st.lists(
    st.one_of(ARRIVAL, ARRIVAL, STEP, STEP, ABORT), min_size=10, max_size=40
)


def skip_without(subject: Subject) -> None:
    """Skip where the release has no such code."""
    try:
        found = find_spec(subject.module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"this vLLM has no {subject.module}; make release-test runs it")


class Pair:
    """A fix's connector of both versions, on a small block pool."""

    def __init__(
        self,
        subject: Subject,
        model: Path,
        edit: tuple[str, str] | None = None,
        **transfer: Any,
    ) -> None:
        self._subject, self._model = subject, model
        self._modules = before_and_after(subject.module, edit)
        self._transfer = subject.kv_transfer | transfer
        self.counts: Counter[str] = Counter()

    def scheduler(self) -> LoneScheduler:
        for module in self._modules:
            self._subject.prepare(module)
        return LoneScheduler(
            self._model,
            self._transfer,
            lambda *configs: Twin(
                *(self._subject.make(module, *configs) for module in self._modules)
            ),
            self._subject.worker(),
            # Too few for all, so that some are preempted.
            num_blocks=18,
            max_model_len=12 * BLOCK_SIZE,
            max_requests=8,
            max_batched_tokens=4 * BLOCK_SIZE,
        )

    def notice(self) -> bool:
        """Whether the two are found to differ."""
        try:
            self.explore(QUICK)
        except Exception:
            traceback.print_exc()
            return True
        return False

    def explore(self, effort: settings) -> Counter[str]:
        """Counts of what happened. Raises AssertionError where the two differ."""
        lone = self.scheduler()

        @effort
        @given(EVENTS)
        def run(events: list[tuple]) -> None:
            self._run(lone, events)

        run()
        return self.counts

    def _run(self, lone: LoneScheduler, events: list[tuple]) -> None:
        names = []
        for kind, *what in events:
            if kind == "add":
                family, prompt_tokens, output_tokens = what
                shared = min(prompt_tokens, 3 * BLOCK_SIZE)
                number = self.counts["requests"]
                own = [10 + number // 1_000, number % 1_000] * prompt_tokens
                prompt = ([family + 1] * shared + own)[:prompt_tokens]
                names.append(lone.add(prompt, output_tokens))
                self.counts["requests"] += 1
            elif kind == "abort" and names:
                name = names[what[0] % len(names)]
                self.counts["aborts"] += name in lone.core.requests
                lone.abort(name)
            elif kind == "step":
                reporting, steps = what
                for _ in range(steps):
                    self._count(lone.step(reporting))
        for name in names:
            lone.abort(name)
        # What is in flight ends, so that the next example starts alike.
        for _ in range(3):
            lone.step()
        assert not lone.core.requests
        assert lone.core.reset_prefix_cache()

    def _count(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        self.counts["steps"] += 1
        self.counts["new"] += len(output.scheduled_new_reqs)
        self.counts["cached"] += len(cached.req_ids)
        self.counts["preemptions"] += len(output.preempted_req_ids or ())
        self.counts["finished"] += len(output.finished_req_ids)
        self.count(output.kv_connector_metadata)

    def count(self, meta: Any) -> None:
        """What is in the connector's own metadata."""
