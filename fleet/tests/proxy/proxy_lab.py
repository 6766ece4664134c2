# SPDX-License-Identifier: Apache-2.0
"""The proxy as a process of its own, and a client that sees everything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve
from tests.harness.forked import Forked
from tests.harness.standin.process import Standin

from kvtax_fleet.instances import write_instances
from kvtax_fleet.policies import named_values
from kvtax_fleet.records.instances import Instance

# Until something that never happens is called so, on a machine of any speed.
DEADLINE_S = 120.0
# 5 ms a token: an answer of 400 tokens takes two seconds.
SLOW = ("--decode-us", "5000")
DONE = b"data: [DONE]\n\n"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Of an error answer, or of a stream's last event."""
        last = self.body.strip().split(b"\n")[-1].removeprefix(b"data: ")
        return json.loads(last)["error"]


def until(true: Callable[[], Any], what: str) -> Any:
    """What `true` returns once it is true; AssertionError after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not (seen := true()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return seen


def ask(prompt: Any = (1, 2, 3), max_tokens: int = 3, **more: Any) -> dict[str, Any]:
    fields = {"model": "null", "prompt": prompt, "max_tokens": max_tokens}
    return {**fields, "stream": True, "temperature": 0, **more}


def post(
    url: str,
    body: dict[str, Any] | bytes,
    path: str = "/v1/completions",
    **headers: str,
) -> Answer:
    """The whole answer, an error's too. Header names with _ for -."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named["Content-Type"] = "application/json"
    request = urllib.request.Request(url + path, raw, named)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return Answer(answer.status, dict(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, dict(error.headers), error.read())


def get(url: str, **headers: str) -> Answer:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return Answer(answer.status, dict(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, dict(error.headers), error.read())


def connect(
    url: str, body: dict[str, Any], *lines: str, **headers: str
) -> socket.socket:
    """A connection on which the request has been sent and nothing read.

    `lines` are further headers, as they are sent.
    """
    raw = json.dumps(body).encode()
    at = urlsplit(url)
    named = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    more = "".join(f"{line}\r\n" for line in [*lines, *named])
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {at.netloc}\r\n{more}"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    client = socket.create_connection((at.hostname, at.port), DEADLINE_S)
    client.sendall(head.encode() + raw)
    return client


class Proxy(NamedTuple):
    """A running proxy; `control` is the URL of its control surface."""

    process: subprocess.Popen[str]
    url: str
    control: str
    log: Path

    def get(self, path: str) -> Answer:
        """Read from the control surface."""
        return get(self.control + path)

    def instances(self) -> dict[str, Any]:
        return self.get("/breakdown").json["instances"]

    def out(self) -> list[str]:
        return self.get("/health").json["out"]

    def lines(self, kind: str) -> list[dict[str, Any]]:
        whole = self.log.read_bytes().split(b"\n")[1:-1]
        return [line for line in map(json.loads, whole) if line["type"] == kind]

    def end(self, id_: str) -> dict[str, Any]:
        """The end line of a request, once it is there."""
        return until(
            lambda: next((end for end in self.lines("end") if end["id"] == id_), None),
            f"no end line for {id_}",
        )

    def idle(self) -> None:
        """Returns once nothing is in flight: no counter has leaked."""

        def nothing() -> bool:
            breakdown = self.get("/breakdown").json
            return breakdown["offloads"] == 0 and all(
                each["requests"] == each["ongoing_tokens"] == 0
                and each["pending_prefill_tokens"] == 0
                for each in breakdown["instances"].values()
            )

        until(nothing, f"still in flight: {self.get('/breakdown').body}")

    def accounted(self, requests: int) -> None:
        """Asserts one end line per request, and an end line for each decision."""
        until(lambda: len(self.lines("end")) >= requests, "end lines are missing")
        numbers = [end["number"] for end in self.lines("end")]
        assert sorted(numbers) == list(range(requests))
        assert {each["number"] for each in self.lines("decision")} <= set(numbers)


def split_options(
    policy: str, options: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that options are, and the options that are no settings."""
    settings: dict[str, Any] = {"policy": policy}
    others, option = [], ""
    for word in options:
        if word.startswith("--"):
            option = word
        elif option == "--parameters":
            settings.setdefault("parameters", {}).update(named_values([word]))
        elif option in ("--host", "--port", "--control-port"):
            others += [option, word]
        else:
            settings[option[2:].replace("-", "_")] = json.loads(word)
    return settings, others


@contextlib.contextmanager
def proxy(
    folder: Path, instances: list[Instance], policy: str = "round_robin", *options: str
) -> Iterator[Proxy]:
    """Start one before these instances, on a free port unless the options say.

    Options may be any of the settings, `--silence-timeout-s` for `silence_timeout_s`.
    """
    number = len(list(folder.glob("*.instances.json")))
    file, log = (
        folder / f"{number}.instances.json",
        folder / f"{number}.decisions.jsonl",
    )
    write_instances(file, instances)
    settings, others = split_options(policy, options)
    (path := folder / f"{number}.settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "kvtax", "proxy", "--instances", str(file)]
    command += ["--settings", str(path), "--log", str(log), *others]
    with Forked(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            control = process.stdout.readline().strip().removeprefix("control: ")
            yield Proxy(process, url, control, log)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def named(standins: list[Standin]) -> list[Instance]:
    return [
        Instance(name, each.url) for name, each in zip("ab", standins, strict=False)
    ]


def resident_bytes(process: int) -> int:
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """A port that no outgoing connection takes before a server gets to it."""
    return reserve(1)[0].http


def first_event(client: socket.socket) -> bytes:
    got = b""
    while b"data:" not in got:
        got += client.recv(65536)
    return got


def rest(client: socket.socket) -> bytes:
    got = b""
    while piece := client.recv(65536):
        got += piece
    return got
