# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from lab import Lab, Reference, ready

from microbench.preflight import require_honest_transfers


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Lab:
    require_honest_transfers()
    return Lab(tmp_path_factory.mktemp("transfers"))


@pytest.fixture(scope="session")
def reference(lab) -> Reference:
    with ready(lab.instance()) as (single,):
        yield Reference(single)
