# SPDX-License-Identifier: Apache-2.0
"""Ways to grow with |cache| that have passed for flat, in records of known truth.

The same lies in real servers: configs/profiles/liars.toml.
"""

from __future__ import annotations

import numpy as np
import pytest
from lies import BLOCKS, Cost, Facts, growing, write_lies

from microbench.analysis.analysis import analyse
from microbench.analysis.trials import load_run

pytestmark = pytest.mark.slow

HIDDEN = "in no method"


def every_third(facts: Facts) -> np.ndarray:
    return np.where(facts.number % 3 == 0, 60 * facts.blocks_1k, 0)


def prefill_only(facts: Facts) -> np.ndarray:
    return np.where(facts.prefills, 2_000 * facts.blocks_1k, 0)


def where_requests_end(facts: Facts) -> np.ndarray:
    return np.where(facts.number % 60 == 30, 1_200 * facts.blocks_1k, 0)


def beyond_half(facts: Facts) -> np.ndarray:
    return 40 * np.maximum(facts.blocks_1k - BLOCKS / 2_000, 0)


LIES: dict[str, dict[str, Cost]] = {
    "one method cancels the other": {
        "worker.get_finished": growing(3),
        "worker.get_block_ids_with_load_errors": growing(6),
    },
    "a hook that had no clock": {"worker.get_kv_connector_stats": growing(20)},
    "a hook of a layer": {"worker.save_kv_layer": growing(20)},
    "before a step": {"scheduler.get_num_new_matched_tokens": prefill_only},
    "every third step": {"worker.get_finished": every_third},
    "steps with prefill": {"scheduler.build_connector_meta": prefill_only},
    "steps in which a request ends": {
        "scheduler.request_finished_all_groups": where_requests_end
    },
    "in the worker after a request ended": {"worker.get_finished": where_requests_end},
    "a thread": {"a thread": growing(20)},
    "beyond half of the cache": {"worker.get_finished": beyond_half},
    "the square": {"worker.get_finished": lambda f: 1.3 * f.blocks_1k**2},
}
TRUTHS: dict[str, dict[str, Cost]] = {
    "nothing": {},
    "a constant": {"worker.get_finished": lambda f: np.full(len(f.number), 200.0)},
    "running requests": {"scheduler.build_connector_meta": lambda f: 20 * f.running},
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, str]:
    """What a run of all these connectors calls each of them."""
    folder = tmp_path_factory.mktemp("run")
    write_lies(folder, LIES | TRUTHS | {HIDDEN: {"the engine": growing(20)}})
    found = analyse(*load_run(folder), None).document.configs
    return {name: entry.verdict for name, entry in found.items()}


@pytest.mark.parametrize("name", LIES)
def test_growth_with_cache_is_seen_wherever_it_is(name, verdicts):
    assert verdicts[name] == "grows"


@pytest.mark.parametrize("name", TRUTHS)
def test_what_does_not_grow_with_cache_is_flat(name, verdicts):
    assert verdicts[name] == "flat"


def test_a_step_that_grows_where_nobody_looks_is_not_flat(verdicts):
    assert verdicts[HIDDEN] == "inconclusive"
