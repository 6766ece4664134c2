# SPDX-License-Identifier: Apache-2.0
"""What direct reads refuse at start, where blocks are in memory, and when to write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from connectors.direct_read.metadata import DirectReadMetadata
from connectors.direct_read.settings import Settings
from connectors.direct_read.worker import device_fence, regions_of

pytestmark = pytest.mark.long

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
FULL = FullAttentionSpec(**SHAPE)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("DIRECT_READ_SECRET", "sixteen bytes or more")
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def settings(
    *specs,
    parallel=(),
    caching=True,
    policy="recompute",
    scheduling="fcfs",
    drafts=None,
    sleeps=False,
    kv_scales=False,
    **extra,
):
    sizes = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_index": 0,
    }
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra,
            kv_load_failure_policy=policy,
            is_kv_producer=True,
            is_kv_consumer=True,
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=caching, calculate_kv_scales=kv_scales
        ),
        speculative_config=drafts,
        scheduler_config=SimpleNamespace(policy=scheduling),
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        parallel_config=SimpleNamespace(**sizes | dict(parallel)),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (FULL,)]
    return Settings.of(config, SimpleNamespace(kv_cache_groups=groups))


def test_settings_are_as_given():
    given = settings(port=7000, mooncake_protocol="tcp")
    assert (given.host, given.port, given.protocol) == ("127.0.0.1", 7000, "tcp")
    assert settings(parallel={"data_parallel_index": 2}, port=7000).port == 7002
    assert settings(parallel={"data_parallel_index": 2}).port == 0


@pytest.mark.parametrize(
    ("says", "wrong"),
    [
        ("kv_load_failure_policy", {"policy": "fail"}),
        ("--enable-prefix-caching", {"caching": False}),
        ("pipeline_parallel_size to 1", {"parallel": {"pipeline_parallel_size": 2}}),
        ("context_parallel", {"parallel": {"decode_context_parallel_size": 2}}),
        ("context_parallel", {"parallel": {"prefill_context_parallel_size": 2}}),
        ("--speculative-config", {"drafts": object()}),
        ("--scheduling-policy", {"scheduling": "priority"}),
        ("--enable-sleep-mode", {"sleeps": True}),
        ("--calculate-kv-scales", {"kv_scales": True}),
        ("has prot; it takes", {"prot": "tcp"}),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_set(says, wrong):
    with pytest.raises(ValueError, match=says):
        settings(**wrong)


@pytest.mark.parametrize(
    ("says", "specs"),
    [
        ("2 KV cache groups", [FULL, FULL]),
        ("MLAAttentionSpec", [MLAAttentionSpec(**SHAPE)]),
        ("SlidingWindowSpec", [SlidingWindowSpec(**SHAPE, sliding_window=64)]),
    ],
)
def test_other_kv_caches_are_refused(says, specs):
    with pytest.raises(ValueError, match=says):
        settings(*specs)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("DIRECT_READ_SECRET", None, "DIRECT_READ_SECRET"),
        ("DIRECT_READ_SECRET", "fifteen bytes..", "at least 16 bytes"),
        ("PYTHONHASHSEED", None, "PYTHONHASHSEED"),
    ],
)
def test_what_the_environment_lacks_is_said(name, value, says, monkeypatch):
    monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=says):
        settings()


BLOCKS = 6


def by_block(cache: torch.Tensor, block_dim: int) -> list[list[int]]:
    """For each block the offsets of its elements in memory, sorted."""
    offsets = torch.arange(cache.numel()).as_strided(cache.shape, cache.stride())
    return [
        sorted(offsets.select(block_dim, i).flatten().tolist()) for i in range(BLOCKS)
    ]


@pytest.mark.parametrize(
    ("cache", "block_dim"),
    [
        (torch.zeros(2, BLOCKS, 2, 16, 8), 1),
        (torch.zeros(BLOCKS, 2, 16, 2, 8), 0),
        # The heads before the tokens.
        (torch.zeros(2, BLOCKS, 2, 16, 8).transpose(2, 3), 1),
        (torch.zeros(BLOCKS, 2, 2, 16, 8).transpose(2, 3), 0),
    ],
)
def test_regions_are_where_the_blocks_are(cache, block_dim):
    regions = regions_of({"one": cache, "shared": cache}, BLOCKS)
    assert len(regions) == (2 if block_dim else 1)
    size = cache.element_size()
    for block, offsets in enumerate(by_block(cache, block_dim)):
        covered = []
        for address, block_bytes in regions:
            first = (address - cache.data_ptr() + block * block_bytes) // size
            covered += range(first, first + block_bytes // size)
        assert sorted(covered) == offsets


def test_blocks_of_several_kernel_blocks_are_whole():
    ((_, block_bytes),) = regions_of({"one": torch.zeros(4 * BLOCKS, 2, 8)}, BLOCKS)
    assert block_bytes == 4 * 2 * 8 * 4


@pytest.mark.parametrize(
    "cache",
    [
        # Blocks that do not follow each other, and none at all.
        torch.zeros(3, BLOCKS, 8),
        torch.zeros(16, BLOCKS, 8).transpose(0, 1),
        torch.zeros(2, 16, BLOCKS, 8).transpose(1, 2),
        torch.zeros(2 * BLOCKS, 8)[::2],
    ],
)
def test_other_layouts_are_refused(cache):
    with pytest.raises(ValueError, match="blocks"):
        regions_of({"one": cache}, BLOCKS)


class FakeEvent:
    """Notes what is done with it, and to which device."""

    def __init__(self, device: torch.device) -> None:
        self.done = [device.type]

    def record(self) -> None:
        self.done.append("recorded")

    def synchronize(self) -> None:
        self.done.append("waited for")


def test_a_pull_waits_for_what_the_device_was_given_before(monkeypatch):
    worker_module = pytest.importorskip("connectors.direct_read.worker")
    monkeypatch.setattr(torch, "Event", FakeEvent)
    begun = []
    worker = object.__new__(worker_module.DirectReadWorker)
    worker._device = torch.device("cuda")
    worker._puller = SimpleNamespace(begin=lambda pull, fence: begun.append(fence))
    worker.start_load_kv(DirectReadMetadata(pulls=["one", "two"]))
    (event,) = {fence.__self__ for fence in begun}
    assert (len(begun), event.done) == (2, ["cuda", "recorded"])
    begun[0]()
    assert event.done[-1] == "waited for"


def test_a_cpu_has_done_what_it_was_given():
    device_fence(torch.device("cpu"))()
