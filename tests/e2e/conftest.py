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
    """Lives to the end of this folder. test_main_job wants the machine for itself, so
    it runs before the first test that asks for this.
    """
    with ready(lab.instance()) as (single,):
        yield Reference(single)
