# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from lab.serving.preflight import require_honest_transfers
from lab.tiny.servers import Reference, TinyServers, ready


@pytest.fixture(scope="package")
def lab(tmp_path_factory) -> TinyServers:
    require_honest_transfers()
    return TinyServers(tmp_path_factory.mktemp("transfers"))


@pytest.fixture(scope="package")
def reference(lab) -> Reference:
    """Stays to the end: test_main_job, which wants the machine for itself, runs before
    whoever asks for it.
    """
    with ready(lab.instance()) as (single,):
        yield Reference(single)
