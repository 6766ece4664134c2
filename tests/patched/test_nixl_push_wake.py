# SPDX-License-Identifier: Apache-2.0
"""NixlPush wakes its writer thread if there is a request to hear of, and else not."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from contextlib import suppress

import pytest

PATCHES = ["nixl_push_idle_wake"]
WAITING = ["_recving_metadata", "_reqs_to_process", "_reqs_to_send"]

with suppress(ModuleNotFoundError):
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import push_worker


@pytest.fixture
def worker(monkeypatch):
    """The real worker's step, on a base class that has nothing to report."""
    if "push_worker" not in globals():
        pytest.skip("this vLLM has no NixlPush; make release-test runs it")
    kind = push_worker.NixlPushConnectorWorker
    if ask := getattr(kind, "get_transfer_results", None):
        nothing, popped = base.KVConnectorTransferResults, (set(), set())
    else:
        # Before 0.30.0, which tells of failures, too.
        ask, nothing, popped = kind.get_finished, lambda: (set(), set()), set()
    monkeypatch.setattr(
        push_worker.NixlBaseConnectorWorker, ask.__name__, lambda self: nothing()
    )
    made = object.__new__(kind)
    made._push_writer_wake = threading.Event()
    made._sending_transfers_lock = threading.Lock()
    made._sending_transfers, made._send_failures = {}, set()
    made._evict_finished_inbox = queue.Queue()
    made.consumer_notification_counts_by_req = defaultdict(int)
    made._recving_metadata, made._reqs_to_send = {}, {}
    made._reqs_to_process = set()
    made._pop_done_transfers = lambda transfers: popped
    made.step = lambda: ask(made)
    return made


def test_a_step_without_requests_wakes_nobody(worker):
    worker.step()
    assert not worker._push_writer_wake.is_set()


@pytest.mark.parametrize("where", WAITING)
def test_a_step_with_a_request_on_the_way_wakes_the_writer(worker, where):
    waiting = getattr(worker, where)
    waiting.add("one") if isinstance(waiting, set) else waiting.update(one=1.0)
    worker.step()
    assert worker._push_writer_wake.is_set()
