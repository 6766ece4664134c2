# SPDX-License-Identifier: Apache-2.0
"""DirectReadConnector with gates: a test can hold a server at a chosen moment.

A gate is closed while a file of its name is in the folder that GATES_VARIABLE names.
Code that comes to a closed gate writes `<name>.reached` and waits until the file is
gone. Files with the names of switches turn a safety measure off; what then follows must
go wrong. Nothing else differs: the transfer engine, the memory and the side channel are
real.
"""

import copy
import os
import time
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import connectors.direct_read.client as client
import connectors.direct_read.reads as reads
from connectors.direct_read.connector import DirectReadConnector
from tests.e2e.gates import (
    GATES_VARIABLE,
    LOOKUP,
    MID_READ,
    OFFER_IN_FLIGHT,
    READ,
    STEP,
    TRUST_ALL,
    VALIDATE,
)

GATES = Path(os.environ[GATES_VARIABLE])


def wait_at(name: str) -> None:
    gate = GATES / name
    if gate.exists():
        (GATES / f"{name}.reached").touch()
        while gate.exists():
            time.sleep(0.001)


class GatedDirectReadConnector(DirectReadConnector):
    def start_load_kv(self, forward_context, **kwargs) -> None:
        super().start_load_kv(forward_context, **kwargs)
        # Only steps with a forward pass.
        if forward_context is not None and forward_context.attn_metadata:
            wait_at(STEP)

    def bind_gpu_block_pool(self, gpu_block_pool) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        scheduler = self.connector_scheduler
        assert scheduler is not None and scheduler.ledger is not None
        ledger = scheduler.ledger
        lookup = ledger.lookup

        def unsafe_lookup(hashes):
            if not (GATES / OFFER_IN_FLIGHT).exists():
                return lookup(hashes)
            # A copy with the same offers: the engine goes on counting in its own.
            unsafe = copy.copy(ledger)
            unsafe._steps_done = 1 << 60
            offer = type(ledger).lookup(unsafe, hashes)
            ledger._num_held_blocks = unsafe._num_held_blocks
            return offer

        ledger.__dict__["lookup"] = unsafe_lookup


_lookup, _validate = client.Client.lookup, client.Client.validate
_begin = reads._begin


def gated_lookup(self, hashes):
    wait_at(LOOKUP)
    return _lookup(self, hashes)


def gated_validate(self, token):
    wait_at(VALIDATE)
    if (GATES / TRUST_ALL).exists():
        return 1 << 40
    return _validate(self, token)


def gated_begin(engine, session, waiting, in_flight):
    wait_at(MID_READ if in_flight else READ)
    return _begin(engine, session, waiting, in_flight)


for method in (("lookup", gated_lookup), ("validate", gated_validate)):
    setattr(client.Client, *method)
reads._begin = gated_begin

KVConnectorFactory.register_connector(
    GatedDirectReadConnector.__name__, __name__, GatedDirectReadConnector.__name__
)
