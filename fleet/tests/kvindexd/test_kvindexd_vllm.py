# SPDX-License-Identifier: Apache-2.0
"""kvindexd, and llm-d's code, against vLLM's own caches: what vLLM would find."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from fleet.tests.kvindexd.kvindexd_lab import DEADLINE_S, Engine, Index, needs_go
from kvtax.engine.releases import release

from kvtax_fleet.launch.kvindexd import LLMD_LOOKUP
from kvtax_fleet.proxy.apis import APIS, COMPLETIONS
from kvtax_fleet.proxy.body import Body
from kvtax_fleet.proxy.kvindexd import Kvindexd

pytestmark = [pytest.mark.long, needs_go, pytest.mark.timeout(1800)]
BLOCKS = 150
# By name: blocks, tokens per block, algorithm.
ENGINES = {
    "a": (BLOCKS, 16, "sha256"),
    "b": (BLOCKS, 16, "sha256"),
    "c": (BLOCKS, 4, "sha256_cbor"),
}


@contextmanager
def running(
    folder: Path, settings: dict[str, tuple], *flags: str, **engine_settings
) -> Iterator[tuple[list[Engine], Index]]:
    engines = [
        Engine(name, folder, *map(str, one), **engine_settings)
        for name, one in settings.items()
    ]
    try:
        for engine in engines:
            engine("free")  # it has started
        with following(engines, folder, *flags) as index:
            yield engines, index
    finally:
        for engine in engines:
            engine.kill()


@contextmanager
def following(
    engines: list[Engine], folder: Path, *flags: str, **program
) -> Iterator[Index]:
    """An index that follows the engines."""
    index = Index(engines, folder, *flags, **program)
    try:
        yield index
    finally:
        index.kill()


class Workload:
    """Prompts that begin like others, some with a salt or an adapter."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.prompts: list[dict] = [{"ids": [1, 2, 3]}]

    def prompt(self) -> dict:
        random = self.random
        earlier = random.choice(self.prompts[-200:])
        begin = earlier["ids"][: random.randrange(1, 500)]
        more = [random.randrange(3) for _ in range(random.choice([1, 16, 40, 300]))]
        made = earlier | {"ids": begin + more}
        if random.random() < 0.1:
            made = {"ids": made["ids"], "salt": random.choice(["s", "tenant"])}
        elif random.random() < 0.1:
            made = {"ids": made["ids"], "lora": "adapter"}
        self.prompts.append(made)
        return made

    def step(self, engine: Engine) -> None:
        random = self.random
        dice = random.random()
        if dice < 0.02:
            engine("reset")
        elif dice < 0.1:
            engine("free")
        else:
            output = [random.randrange(3) for _ in range(random.choice([0, 30]))]
            stay = random.random() < 0.3
            if not engine("run", prompt=self.prompt(), output=output, stay=stay):
                engine("free")

    def asked(self, number: int) -> list[dict]:
        known = self.random.choices(self.prompts, k=number // 2)
        return known + [self.prompt() for _ in range(number - len(known))]


def checked(engines: list[Engine], index: Index, prompts: list[dict]) -> int:
    """Asserts that the index agrees with all engines; returns the tokens found."""
    index.wait()
    said = index.tokens(prompts)
    found = 0
    for engine in engines:
        computed = engine("computed", prompts=prompts)
        assert said[engine.name] == computed, index.instances()
        found += sum(computed)
    return found


def test_ten_thousand_answers_are_the_engines(tmp_path):
    workload = Workload(1)
    snapshot = tmp_path / "snapshot"
    flags = "-snapshot", str(snapshot), "-snapshot-every", "1s"
    asked, rounds = 0, 100
    with running(tmp_path, ENGINES, *flags) as (engines, index):
        found = 0
        for number in range(rounds):
            for _ in range(30):
                workload.step(workload.random.choice(engines))
            if number % 10 == 3:  # in the middle of the events
                index.kill()
                index.start()
            elif number % 10 == 7:
                assert index.stop() == 0
                workload.step(engines[0])
                index.start()
            elif number % 30 == 15:
                engine = workload.random.choice(engines)
                engine.kill()
                engine.start()
                engine("free")
            prompts = workload.asked(100)
            found += checked(engines, index, prompts)
            asked += len(prompts)
        states = index.instances()
    assert asked >= 10_000
    assert found > 200_000
    assert all(one["complete"] for one in states.values())


def test_the_first_answer_after_a_warm_restart_is_right(tmp_path):
    """Also where the replay no longer reaches back to the beginning."""
    workload = Workload(2)
    flags = "-snapshot", str(tmp_path / "snapshot")
    with running(tmp_path, {"a": ENGINES["a"]}, *flags) as (engines, index):
        for _ in range(20):
            workload.step(engines[0])
        index.wait()
        assert index.stop() == 0
        for _ in range(20):
            workload.step(engines[0])
        index.start()
        assert checked(engines, index, workload.asked(100)) > 0
        assert (
            index.instances()["a"]["batches"] <= 20
        )  # the others were not taken again


def test_a_seed_that_is_not_known_is_told_and_not_guessed(tmp_path):
    settings = {"a": ENGINES["a"]}
    with running(tmp_path, settings, seed="77") as (engines, index):
        prompt = {"ids": list(range(100))}
        engines[0]("run", prompt=prompt, output=[], stay=False)
        index.wait()
        state = index.instances()["a"]
        assert state["naming"] == "another seed"
        assert state["skipped_blocks"] == 6
        assert index.tokens([prompt]) == {"a": [0]}
        assert "PYTHONHASHSEED" in (tmp_path / "kvindexd.log").read_text()


TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Hybrid models, and the kinds of their groups of layers. The convolutions of LFM2 keep
# a state, as Mamba layers do.
HYBRIDS = {
    "gemma3": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": 100,
            "query_pre_attn_scalar": 32,
        },
        ["SlidingWindowSpec"] * 3 + ["FullAttentionSpec"],
    ),
    "lfm2": (
        {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "conv_bias": False,
            "conv_dim": 64,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
        ["MambaSpec", "FullAttentionSpec"],
    ),
}
HYBRID_RELEASE = "0.32.0"


@pytest.mark.parametrize("model", HYBRIDS)
def test_answers_for_a_hybrid_model_are_the_engine_s(tmp_path, model):
    """A whole vLLM runs it, and has to evict."""
    config, kinds = HYBRIDS[model]
    folder = tmp_path / model
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY | config))
    installed = release(HYBRID_RELEASE)
    settings = {"a": (BLOCKS, 32, folder)}
    workload = Workload(3)
    with running(tmp_path, settings, release=installed) as (engines, index):
        assert engines[0]("free") == kinds
        found = 0
        for number in range(12):
            if number == 8:
                engines[0]("reset")  # published with the next step
            for output in range(0, 40, 13):
                prompt = workload.prompt() | {"lora": None}
                engines[0]("run", prompt=prompt, output=[7] * output, stay=False)
            asked = [prompt | {"lora": None} for prompt in workload.asked(40)]
            found += checked(engines, index, asked)
        state = index.instances()["a"]
    assert found > 5_000, "too little was found to tell answers apart"
    assert state["complete"] and len(state["groups"]) == len(kinds), state


BLOCK_TOKENS = 16
NAMES = ["a", "b"]


def said(index: Index, prompts: list[list[int]]) -> list[list[int] | None]:
    """What the proxy takes to be cached of each prompt, by instance."""

    async def ask() -> list[list[int] | None]:
        async with Kvindexd(index.address, NAMES) as asked:
            return [
                await asked.cached_tokens(
                    Body(
                        json.dumps({"model": "m", "prompt": prompt}).encode(),
                        APIS[COMPLETIONS],
                    )
                )
                for prompt in prompts
            ]

    return asyncio.run(ask())


def connected(engines: list[Engine], llmd: Index, random: Random) -> None:
    """Wait until llmd-lookup hears of what each engine caches.

    llm-d's code asks for nothing that it missed.
    """
    deadline = time.monotonic() + DEADLINE_S
    for place, engine in enumerate(engines):
        while True:
            prompt = prompt_of(random, [])
            engine("run", prompt={"ids": prompt}, output=[], stay=False)
            time.sleep(0.1)
            if said(llmd, [prompt])[0][place]:
                break
            assert time.monotonic() < deadline, f"llmd-lookup hears nothing of {place}"


def prompt_of(random: Random, begin: list[int]) -> list[int]:
    """A prompt whose last block is not whole.

    vLLM computes a whole last block again, and so holds it twice, which llm-d's index
    does not count.
    """
    more = random.randrange(1, 6) * BLOCK_TOKENS + 5 - len(begin) % BLOCK_TOKENS
    return begin + [random.randrange(1 << 20) for _ in range(more)]


def test_the_proxy_hears_the_same_tokens_from_llm_d_s_code(tmp_path):
    random = Random(1)
    prompts = [prompt_of(random, [])]
    settings = dict.fromkeys(NAMES, (60, BLOCK_TOKENS, "sha256"))
    with (
        running(tmp_path, settings) as (engines, kvindexd),
        following(engines, tmp_path, program=LLMD_LOOKUP) as llmd,
    ):
        connected(engines, llmd, random)
        for number in range(80):
            engine = random.choice(engines)
            if number % 30 == 20:
                engine("reset")
                continue
            earlier = random.choice(prompts[-10:])
            prompt = prompt_of(random, earlier[: random.randrange(len(earlier))])
            prompts.append(prompt)
            assert engine("run", prompt={"ids": prompt}, output=[7], stay=False)
        kvindexd.wait()
        wanted = said(kvindexd, prompts)
        deadline = time.monotonic() + DEADLINE_S
        while (found := said(llmd, prompts)) != wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found == wanted
    assert sum(max(one) for one in wanted) > 1_000
    assert any(a != b for a, b in wanted)
    assert any(max(one) == 0 for one in wanted), "nothing was evicted"
