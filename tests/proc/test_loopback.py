# SPDX-License-Identifier: Apache-2.0
"""A proxy of the host stands between us and no server of ours."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kvtax_fleet.launch.launched import http_text

from kvtax.engine.environment import engine_environment
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.engine.server import http_ok
from kvtax.paths import REPOSITORY
from kvtax.proc.loopback import NAMES, without_proxy
from kvtax.proc.ports import LOOPBACK, reserve
from tests.harness.standin.process import standin

VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY")
LIBRARIES = {
    "urllib": "from urllib.request import urlopen; assert urlopen(url).status == 200",
    "httpx": "import httpx; assert httpx.get(url).status_code == 200",
    "requests": "import requests; assert requests.get(url).status_code == 200",
}


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"well")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer((LOOPBACK, 0), Healthy) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://{LOOPBACK}:{server.server_port}/health"
        server.shutdown()


@pytest.fixture
def dead_proxy(monkeypatch) -> str:
    """Name a proxy that nothing listens at, as the whole environment's."""
    proxy = f"http://{LOOPBACK}:{reserve(1)[0].http}"
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name in VARIABLES:
        monkeypatch.setenv(name, proxy)
    return proxy


def test_a_server_is_seen_behind_a_dead_proxy(url, dead_proxy):
    # urlopen may have an opener of the time before.
    with pytest.raises(OSError, match="refused"):
        urllib.request.build_opener().open(url)
    assert http_ok(url)
    assert http_text(url) == "well"


@pytest.mark.slow
def test_a_stand_in_is_seen_behind_a_dead_proxy(dead_proxy):
    with standin() as running:
        running.set_faults()
        assert running.metrics()


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_runs_in_a_server_reaches_loopback(library, url, dead_proxy):
    env = engine_environment(None, CPU_ENGINE, reserve(1)[0])
    script = f"import sys; url = sys.argv[1]; {LIBRARIES[library]}"
    subprocess.run([sys.executable, "-c", script, url], env=env, check=True)


@pytest.mark.parametrize("name", NAMES)
def test_hosts_that_were_exempt_stay_so(name):
    exempt = without_proxy({name: "corp.example, 10.0.0.0/8,localhost"})
    assert exempt == dict.fromkeys(
        NAMES, "corp.example,10.0.0.0/8,localhost,127.0.0.1,::1"
    )
    assert without_proxy(exempt) == exempt
    assert without_proxy({name: "*"}) == dict.fromkeys(NAMES, "*")


def test_no_code_of_ours_opens_a_url_by_way_of_a_proxy():
    """Tests may: their environment exempts loopback."""
    command = ["git", "grep", "-lE", r"urlopen\(|trust_env|http\.client import HTTPC"]
    command += ["--", "*.py", ":!*tests/*"]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert shown.stdout == ""
