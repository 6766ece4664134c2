# SPDX-License-Identifier: Apache-2.0
import importlib.util

import pytest


@pytest.fixture(scope="session")
def installed_vllm():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
