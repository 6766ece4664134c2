# SPDX-License-Identifier: Apache-2.0
"""The exact cache state against a real vLLM: what it says is what vLLM then reuses."""

from __future__ import annotations

import json
import random
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from proxy_lab import free_port, post, proxy, until

from fleet.instances import write_instances
from lab.records.instances import Instance
from lab.serving.connector import Connector
from lab.serving.installation import installation
from lab.serving.kvindexd import HASH_SEED, kvindexd
from lab.serving.null_model import null_checkpoint
from lab.serving.server import Server
from lab.serving.server_spec import SERVED_MODEL, Engine, resolve
from lab.serving.settings import CPU_ENGINE
from lab.serving.tree import build_tree

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(not shutil.which("go"), reason="needs Go 1.25"),
]
BLOCK, BLOCKS = 16, 120
# An engine step, and the publisher's look at its queue.
EVENTS_ARRIVE_S = 0.3


@pytest.fixture(params=[1, 2], ids=["one engine", "two engines"])
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Instance]]:
    """A null model with room for few prompts, so that blocks get evicted."""
    # vLLM adds an engine's rank, to ports only.
    port, replay_port = free_port(), free_port()
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {"endpoint": f"tcp://*:{port}"}
    events |= {"replay_endpoint": f"tcp://*:{replay_port}"}
    settings = msgspec.structs.replace(
        CPU_ENGINE,
        data_parallel=request.param,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        server_args=[
            *CPU_ENGINE.server_args,
            "--enable-prompt-tokens-details",
            "--kv-events-config",
            json.dumps(events),
        ],
    )
    build_tree(tmp_path / "tree", installation().package("vllm"), [], {})
    model = null_checkpoint(tmp_path / "model")
    engine = Engine(tmp_path / "tree", settings, Connector("", []), model)
    told = resolve(engine, tmp_path, {}).told(PYTHONHASHSEED=HASH_SEED)
    with Server(told) as server:
        server.wait_ready()
        yield [
            Instance(
                f"i{rank}",
                server.url,
                kv_events=f"tcp://127.0.0.1:{port + rank}",
                kv_events_replay=f"tcp://127.0.0.1:{replay_port + rank}",
                data_parallel_rank=rank,
            )
            for rank in range(request.param)
        ]


def test_exact_state_says_what_vllm_reuses(
    engines: list[Instance], tmp_path: Path
) -> None:
    random.seed(1)
    prompts: list[list[int]] = [[]]
    file = tmp_path / "instances.json"
    write_instances(file, engines)
    with (
        kvindexd(file, tmp_path / "kvindexd.log") as address,
        proxy(tmp_path, engines, "linear", "--kvindexd", address) as on,
    ):
        said, reused = [], []
        for number in range(40):
            begin = random.choice(prompts)[: random.randrange(1, 500)]
            more = random.choice([40, 400])
            prompt = begin + [random.randrange(1000) for _ in range(more)]
            prompts.append(prompt)
            asked = {"model": SERVED_MODEL, "prompt": prompt, "temperature": 0}
            asked |= {"max_tokens": random.choice([1, 40])}
            answer = post(on.url, asked, X_Request_Id=f"r/{number}")
            usage = answer.json["usage"]
            assert usage["prompt_tokens"] == len(prompt)
            details = usage["prompt_tokens_details"] or {}
            reused.append(details.get("cached_tokens", 0))
            on.end(f"r/{number}")
            decision = on.lines("decision")[-1]
            candidates = decision["snapshot"]["candidates"]
            (chosen,) = [
                one for one in candidates if one["name"] == decision["instance"]
            ]
            said.append(chosen["cached_tokens"])
            time.sleep(EVENTS_ARRIVE_S)
        assert said == reused
        assert sum(reused) > 40 * BLOCK
        caches = [one["cache"] for one in on.instances().values()]
        for cache in caches:
            assert cache["complete"]
            assert cache["skipped_blocks"] == 0
            # The mirror knows of no eviction: the two must differ by now.
            assert cache["exact_tokens"] <= BLOCKS * BLOCK < cache["mirror_tokens"]
            assert cache["mean_difference_tokens"] > 0
        url = engines[0].url
        reset = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(reset).close()
        # vLLM publishes what has happened with its next step.
        asked = {"model": SERVED_MODEL, "prompt": [1], "max_tokens": 1}
        for one in engines:
            post(url, asked, X_data_parallel_rank=f"{one.data_parallel_rank}")
        until(
            lambda: (
                [one["cache"]["exact_tokens"] for one in on.instances().values()]
                == [0] * len(engines)
            ),
            "the reset did not arrive",
        )
