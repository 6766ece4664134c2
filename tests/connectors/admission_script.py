# SPDX-License-Identifier: Apache-2.0
"""A real scheduler with too few blocks for the requests that pull: does it go on?

`admission_script.py RESULT MODEL [[admission, seed], ..]` is started by
test_admission.py on a tree with direct_read_hooks.
"""

import json
import random
import sys
from pathlib import Path

from admission_witness import BLOCK_SIZE, MAX_STEPS, AdmissionWitness

from lab.serving.null_engine import NullEngine

WITNESS = {
    "kv_connector": "AdmissionWitness",
    "kv_connector_module_path": "admission_witness",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
NUM_BLOCKS = 60
MOST_BLOCKS = 45
MOST_OUTPUT_TOKENS = 40
REQUESTS = 1_500
AT_ONCE = 12
# Whoever is answered and has pulled is so before.
STALLED_STEPS = 20 * MAX_STEPS


def run(engine: NullEngine, chance: random.Random) -> bool:
    """Whether all requests ended, rather than that nothing did any more."""
    scheduler = engine.core.scheduler
    left, idle_steps = REQUESTS, 0
    executed = True
    while left or scheduler.has_requests():
        while left and scheduler.get_num_unfinished_requests() < AT_ONCE:
            tokens = chance.randrange(1, MOST_BLOCKS * BLOCK_SIZE)
            prompt = [chance.randrange(1, 500) for _ in range(tokens)]
            name = engine.add(prompt, chance.randrange(1, MOST_OUTPUT_TOKENS))
            left -= 1
        # Not an idle engine's: that could end what stands still.
        if executed and chance.random() < 0.02:
            engine.core.abort_requests([name])
        _, executed = engine.core.step_fn()
        idle_steps = 0 if executed else idle_steps + 1
        if idle_steps > STALLED_STEPS:
            engine.core.abort_requests(list(scheduler.requests))
            engine.run_to_end()
            return False
    return True


def main() -> None:
    result, model, runs = sys.argv[1:]
    engine = NullEngine(Path(model), WITNESS, NUM_BLOCKS)
    found = []
    for admission, seed in json.loads(runs):
        AdmissionWitness.begin(admission, seed)
        ended = run(engine, random.Random(seed))
        assert engine.core.scheduler.reset_prefix_cache()
        found.append({"ended": ended} | AdmissionWitness.counted())
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
