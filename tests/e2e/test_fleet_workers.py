# SPDX-License-Identifier: Apache-2.0
"""An instance whose steps two workers compute together, as on two GPUs."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtax.engine.connector import load_connector
from kvtax.engine.server_spec import SERVED_MODEL
from kvtax.fleet.launch.instance_settings import read_instance_settings
from kvtax.fleet.launch.launched import Workshop, launched, wait_ready
from kvtax.fleet.launch.spec import FleetSpec
from kvtax.paths import CONFIGS
from kvtax.records.exposition import cache_config
from kvtax.records.life import only_life

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PROFILE = CONFIGS / "fleet" / "h20-30b-a3b.toml"


def steps(file: Path) -> list[int]:
    lines = file.read_text().splitlines()[1:]
    return [json.loads(line)["step_id"] for line in lines]


def test_both_workers_record_every_step_and_one_counts_its_time(tmp_path):
    settings = msgspec.structs.replace(
        read_instance_settings(PROFILE), tensor_parallel=2, num_blocks=None
    )
    spec = FleetSpec(settings, "noop", load_connector("noop"))
    with (
        Workshop(tmp_path / "workshop") as workshop,
        launched(spec, workshop, tmp_path) as (one,),
    ):
        wait_ready([one])
        body = {"model": SERVED_MODEL, "prompt": [1] * 100, "max_tokens": 8}
        request = urllib.request.Request(
            f"{one.instance.url}/v1/completions",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 8
        with urllib.request.urlopen(f"{one.instance.url}/metrics") as response:
            told = cache_config(response.read().decode())
        forwards, simulated_ns, slept_ns = np.fromfile(one.forward_totals, np.int64)
    assert told["num_gpu_blocks"] > 1_000
    life = only_life(one.folder)
    by_rank = [steps(life / f"worker_step.r{rank}.jsonl") for rank in (0, 1)]
    of_engine = steps(life / "engine_step.jsonl")
    assert by_rank == [of_engine, of_engine]
    # Both together would count twice as many; vLLM's warming up is one, too.
    assert 8 <= forwards < 2 * 8
    assert slept_ns >= simulated_ns > 8 * settings.forward.forward_us * 1e3
