# SPDX-License-Identifier: Apache-2.0
"""What goes through the proxy, where it goes, and what is recorded of it."""

from __future__ import annotations

import http.server
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest
from fleet.tests.proxy.proxy_lab import (
    ask,
    connect,
    get,
    post,
    proxy,
    rest,
    until,
)
from kvtax.cli import main
from kvtax.paths import REPOSITORY
from tests.harness.standin.process import Standin, standin

from kvtax_fleet.policies import POLICIES
from kvtax_fleet.policies.replay import decide_again
from kvtax_fleet.proxy.settings import Settings
from kvtax_fleet.records.instances import Instance

pytestmark = pytest.mark.slow
SERVE = ["proxy", "--url", "http://127.0.0.1:1", "--policy", "lmetric"]
WORDS = "the quick brown fox jumps over the lazy dog\n" * 400


@pytest.fixture(scope="module")
def three() -> Iterator[list[Standin]]:
    with standin() as a, standin() as b, standin() as c:
        yield [a, b, c]


@pytest.fixture(scope="module")
def instances(three: list[Standin]) -> list[Instance]:
    return [
        Instance(name, entry.url, connector="nixl")
        for name, entry in zip("abc", three, strict=True)
    ]


def test_llm_d_decides_by_the_metrics_of_the_instances(instances, tmp_path):
    with proxy(tmp_path, instances, "llm_d") as running:

        def seen() -> list[dict[str, float]]:
            assert post(running.url, ask()).status == 200
            return running.get("/decisions?n=1").json["snapshot"]["candidates"]

        until(lambda: all(each.get("waiting") == 0 for each in seen()), "no metrics")
        assert all(0 <= each.get("kv_used", 0) < 1 for each in seen())


def chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_an_answer_is_passed_on_byte_for_byte(three, instances, tmp_path):
    shapes = [
        ("/v1/completions", ask()),
        ("/v1/completions", ask(WORDS, 50, stream_options={"include_usage": True})),
        ("/v1/completions", ask(stream=False)),
        ("/v1/chat/completions", {**ask(), "messages": chat("hello")}),
        ("/v1/chat/completions", {**ask(stream=False), "messages": chat("hello")}),
    ]
    with proxy(tmp_path, instances[:1]) as on:
        for path, asked in shapes:
            post(three[0].url, asked, path)  # both answers find the prompt cached
            direct = post(three[0].url, asked, path, X_Request_Id="same")
            proxied = post(on.url, asked, path, X_Request_Id="same")
            assert proxied.status == direct.status == 200
            assert proxied.body == direct.body
            kind = "Content-Type"
            assert proxied.headers[kind] == direct.headers[kind]
            assert proxied.headers["X-Kvtax-Instance"] == "a"
        direct = get(f"{three[0].url}/v1/models")
        assert get(f"{on.url}/v1/models").body == direct.body
        on.idle()


FORMS = {
    "ids": ("/v1/completions", lambda n: {"prompt": list(range(500 * n))}),
    "text": ("/v1/completions", lambda n: {"prompt": WORDS[: 4000 * n]}),
    "chat": ("/v1/chat/completions", lambda n: {"messages": chat(WORDS[: 4000 * n])}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_goes_where_its_prefix_is_in_every_form(form, instances, tmp_path):
    path, prompt = FORMS[form]
    with proxy(tmp_path, instances, "lmetric") as on:
        first = post(on.url, {**ask(), **prompt(2)}, path)
        for filler in range(4):  # moves the turn of a tie on
            post(on.url, ask([filler] * 9))
        again = post(on.url, {**ask(), **prompt(4)}, path, X_Request_Id="again")
        name = again.headers["X-Kvtax-Instance"]
        assert name == first.headers["X-Kvtax-Instance"]
        on.end("again")
        decision = next(
            entry for entry in on.lines("decision") if entry["id"] == "again"
        )
        cached = {
            entry["name"]: entry["cached_tokens"]
            for entry in decision["snapshot"]["candidates"]
        }
        half = decision["prompt_tokens"] / 2
        # Whole pieces count, and one has at most 512 tokens.
        assert half - 512 <= cached.pop(name) <= half
        assert set(cached.values()) == {0}
        assert on.instances()[name]["cache"]["mirror_tokens"] >= half


def test_a_session_stays_where_it_is(instances, tmp_path):
    with proxy(tmp_path, instances, "linear") as on:
        for turn in range(4):
            for session in range(5):
                post(
                    on.url,
                    ask([session]),
                    X_Session_Id=f"s{session}",
                    X_Request_Id=f"s{session}/{turn}",
                )
        on.accounted(20)
        places: dict[str, set[str]] = {}
        for entry in on.lines("decision"):
            places.setdefault(entry["session"], set()).add(entry["instance"])
        assert len(places) == 5
        assert all(len(names) == 1 for names in places.values())
        assert len(set().union(*places.values())) == 3


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"pd_sep"}))
def test_recorded_decisions_replay_identically(policy, instances, tmp_path):
    random.seed(policy)
    options = (
        ["--parameters", "warm_tokens=50", "heavy_tokens=100"]
        if policy == "elastic"
        else []
    )
    sizes = [random.choice([5, 60, 600, 2000]) for _ in range(60)]
    with (
        proxy(tmp_path, instances, policy, *options) as on,
        ThreadPoolExecutor(8) as clients,
    ):
        asked = [
            clients.submit(
                post, on.url, ask(list(range(n))), X_Session_Id=f"s{place % 7}"
            )
            for place, n in enumerate(sizes)
        ]
        assert {entry.result().status for entry in asked} == {200}
        on.idle()
        on.accounted(60)
        assert len(on.lines("decision")) == 60
    assert decide_again(on.log).reproduced


@contextmanager
def echo() -> Iterator[str]:
    """A server that answers with what it was sent."""

    class Echo(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            sent = {"headers": headers, "body": body.decode(), "choices": [{}]}
            answer = json.dumps(sent).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            for header in (("Connection", "x-hop, Keep-Alive"), ("X-Hop", "1")):
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(answer)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_headers_that_concern_one_connection_are_not_sent_on(tmp_path):
    with echo() as a, proxy(tmp_path, [Instance("a", a)]) as on:
        headers = ["Connection: close, X-Secret", "Connection: x-other,"]
        headers += ["X-Secret: 1", "X-Other: 1", "Proxy-Connection: close", "X-End: 1"]
        with connect(on.url, ask(), *headers) as client:
            head, _, body = rest(client).partition(b"\r\n\r\n")
        reached = set(json.loads(body)["headers"])
        assert "x-end" in reached
        assert not {"x-secret", "x-other", "proxy-connection"} & reached
        back = {line.split(b":")[0].lower() for line in head.split(b"\r\n")}
        assert b"x-kvtax-instance" in back
        assert b"x-hop" not in back


def test_an_instance_gets_the_clients_body_without_its_transfer_parameters(tmp_path):
    prompt = list(range(3000))
    with echo() as url, proxy(tmp_path, [Instance("a", url)], "linear") as on:
        forged = {"kv_transfer_params": {"remote_host": "evil"}}
        given = {"Authorization": "Bearer key", "X_Request_Id": "t/0"}
        answer = post(on.url, {**ask(prompt), **forged}, X_Session_Id="s", **given)
        assert json.loads(answer.json["body"]) == ask(prompt)
        headers = answer.json["headers"]
        assert headers["authorization"] == "Bearer key"
        assert headers["x-request-id"] == "t/0"


def test_what_the_proxy_says_of_itself(instances, tmp_path):
    with proxy(tmp_path, instances, "load_only") as on:
        for number in range(12):
            post(on.url, ask(), X_Request_Id=f"r/{number}")
        on.idle()
        breakdown = on.get("/breakdown").json
        assert breakdown["decision_us"]["n"] == 12
        assert (
            sum(entry["ended"]["ok"] for entry in breakdown["instances"].values()) == 12
        )
        recent = [
            json.loads(line) for line in on.get("/decisions?n=5").body.split(b"\n")
        ]
        assert [entry["id"] for entry in recent] == [f"r/{n}" for n in range(7, 12)]
        assert set(recent[0]["scores"]) == set("abc")
        assert on.get("/decisions?n=all").status == 400
        assert on.get("/nowhere").status == on.get("/metrics").status == 404
        assert on.get("/health").json == {"healthy": ["a", "b", "c"], "out": []}


@pytest.mark.parametrize(
    "options",
    [
        ["--url", "a=http://h:1", "--policy", "elastic"],
        ["--url", "a=http://h:1", "--policy", "linear", "--parameters", "alpha=x"],
        ["--url", "a", "--policy", "linear"],
        ["--instances", "/nowhere", "--policy", "linear"],
        ["--url", "a=http://h:1"],
        ["--url", "a=http://h:1", "--policy", "nearest"],
        ["--url", "a=http://h:1", "--settings", "/nowhere"],
        ["--url", "a=http://h:1", "--settings", "/nowhere", "--policy", "linear"],
        ["--url", "a=http://h:1", "--policy", "linear", "--parameters", "alpha=nan"],
    ],
)
def test_a_proxy_that_cannot_work_ends_with_2_and_a_message(options, capsys):
    assert main(["proxy", *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("kvtax: ")
    assert printed.out == ""


def test_settings_come_as_one_document_or_as_options(three, tmp_path):
    file = tmp_path / "settings.json"
    settings = Settings("lmetric", max_body_bytes=7)
    file.write_bytes(msgspec.json.encode(settings))
    command = [sys.executable, "-m", "kvtax", "proxy", "--url", f"a={three[0].url}"]
    written = [*command, "--policy", "lmetric", "--max-body-bytes", "7"]
    headers = []
    for number, options in enumerate(([*command, "--settings", str(file)], written)):
        log = tmp_path / f"{number}.jsonl"
        served = subprocess.Popen(
            [*options, "--log", str(log)], cwd=REPOSITORY, stdout=subprocess.PIPE
        )
        served.stdout.readline()
        served.terminate()
        served.wait()
        headers.append(log.read_bytes().split(b"\n")[0])
    assert headers[0] == headers[1]
    assert b'"max_body_bytes":7' in headers[0]


def test_a_host_that_cannot_be_looked_up_is_named(capsys):
    served = ["--url", "a=http://h:1", "--policy", "linear", "--host", "no.invalid"]
    assert main(["proxy", *served]) == 2
    assert "'no.invalid'" in capsys.readouterr().err


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_without_a_package_there_is_help_and_a_remedy():
    without = "import sys; sys.modules['uvloop'] = None; from kvtax.cli import main; "
    given = python(f"{without}sys.exit(main(['proxy', '--help']))")
    assert given.returncode == 0
    served = python(f"{without}sys.exit(main({SERVE!r}))")
    assert served.returncode == 2
    assert "pip install ./fleet" in served.stderr


def test_decisions_are_made_without_http():
    given = python(
        "import sys, kvtax_fleet.proxy.core; print('aiohttp' in sys.modules)"
    )
    assert given.stdout == "False\n"
