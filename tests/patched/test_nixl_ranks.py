# SPDX-License-Identifier: Apache-2.0
"""What NIXL's metrics mean with two tensor parallel ranks, by vLLM's own functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
        NixlKVConnectorStats,
    )
except ModuleNotFoundError:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
        NixlKVConnectorStats,
    )

PATCHES = ["step_timing_v2"]
MIB = 2**20


def recorded(*ranks_s: float | None) -> NixlKVConnectorStats:
    """Record one request whose 100 MiB come in equal parts by all ranks at once.

    Each rank's part takes so long; None is a failure.
    """
    outputs = []
    for took_s in ranks_s:
        stats = NixlKVConnectorStats()
        if took_s is None:
            stats.record_failed_transfer()
        else:
            stats.record_transfer(
                SimpleNamespace(
                    xferDuration=took_s * 1e6,
                    postDuration=10,
                    totalBytes=100 * MIB // len(ranks_s),
                    descCount=48,
                )
            )
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        output.kv_connector_output = KVConnectorOutput(kv_connector_stats=stats)
        outputs.append(output)
    whole = KVOutputAggregator(len(ranks_s)).aggregate(outputs)
    return whole.kv_connector_output.kv_connector_stats


def reported(*ranks_s: float | None) -> dict[str, float]:
    """Return what vLLM logs of that request."""
    return recorded(*ranks_s).reduce()


def test_a_request_counts_once_per_rank():
    first, two = reported(0.1), reported(0.1, 0.1)
    assert first["Num successful transfers"] == 1
    assert two["Num successful transfers"] == 2
    assert first["Avg MB per transfer"] == 2 * two["Avg MB per transfer"] == 100
    assert first["Avg number of descriptors"] == two["Avg number of descriptors"] == 48


def test_throughput_is_that_of_a_rank_while_it_transfers():
    """The request got its 100 MiB in 0.1 s from two ranks: 1,000 MiB/s, not 500."""
    assert reported(0.1, 0.1)["Throughput (MB/s)"] == pytest.approx(500)
    assert reported(0.1)["Throughput (MB/s)"] == pytest.approx(1_000)


def test_unequal_ranks_hide_what_the_request_waited_for():
    """It waits 0.3 s; neither time nor throughput, also times the ranks, tells so."""
    stats = reported(0.1, 0.3)
    assert stats["Avg xfer time (ms)"] == pytest.approx(200)
    assert 2 * stats["Throughput (MB/s)"] == pytest.approx(500) != 100 / 0.3


def test_a_request_that_fails_at_one_rank_is_a_success_and_a_failure():
    stats = recorded(0.1, None)
    assert stats.reduce()["Num successful transfers"] == 1
    assert stats.data["num_failed_transfers"] == [1]
