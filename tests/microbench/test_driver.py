# SPDX-License-Identifier: Apache-2.0
"""The load driver as a process: open loop, one record a request, honest lag."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from microbench.server_cpu import read_cpu
from tests.harness.standin.process import standin
from tests.load.test_load import make_plan as load_plan
from tests.proc.living import eventually

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def make_plan(**changes) -> dict:
    return load_plan(**{"request_timeout_s": 10.0, "lag_budget_ms": 60_000.0} | changes)


@pytest.fixture(scope="module")
def server():
    with standin() as running:
        yield running


@pytest.fixture(scope="module")
def slow_server():
    """A server that takes 50 ms per token."""
    with standin("--step-us", "50000") as running:
        yield running


def before_each_request(code: str) -> str:
    """Write a program that has the driver run `code` as it sends `record`."""
    lines = textwrap.indent(textwrap.dedent(code).strip(), "    ")
    return f"""
import threading, time
from kvtax.load.client import Client, Ledger
request, write = Client.request, Ledger._write
sent, before = threading.Event(), iter(range(99))
async def changed(self, record, *args):
{lines}
    await request(self, record, *args)
Client.request = changed
"""


class Drive:
    """A driver process under way; `finish()` gives its exit status and its records."""

    def __init__(self, tmp_path, url, plan, before="") -> None:
        self.out = tmp_path / "requests.jsonl"
        plan_file = tmp_path / "plan.json"
        plan_file.write_text(json.dumps(plan))
        program = f"import sys\n{before}\nfrom microbench.driver import main\n"
        command = [sys.executable, "-c", program + "sys.exit(main(*sys.argv[1:]))"]
        command += [url, plan_file, self.out, str(os.getpid())]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True
        )

    def wait_for_requests(self, n: int) -> None:
        """Return once `n` requests have ended and are on disk."""

        def ended() -> bool:
            written = self.out.exists() and self.out.read_bytes().count(b'"request"')
            assert self.process.poll() is None, self.process.stderr.read()
            return self.out.exists() and written >= n

        eventually(ended)

    def finish(self) -> Result:
        _, self.stderr = self.process.communicate(timeout=300)
        lines = [json.loads(line) for line in self.out.read_text().splitlines()]
        return Result(self.process.returncode, self.stderr, lines)


class Result:
    """What is left of a run, checked for one record a scheduled request."""

    def __init__(self, code: int, stderr: str, lines: list[dict]) -> None:
        self.code, self.stderr = code, stderr
        self.header, *typed, self.end = lines
        self.requests = [line for line in typed if line["type"] == "request"]
        self.phases = [line for line in typed if line["type"] == "phase"]
        self.cpu = [line for line in typed if line["type"] == "cpu"]
        assert self.end["type"] == "end"
        ids = sorted(request["id"] for request in self.requests)
        assert ids == list(range(self.header["scheduled"]))
        for status in ("ok", "failed", "cancelled"):
            assert self.end[status] == len(self.having(status))
        for request in self.having("failed") + self.having("cancelled"):
            assert request["error"]

    def having(self, status: str) -> list[dict]:
        return [request for request in self.requests if request["status"] == status]

    def errors(self) -> set[str]:
        return {request["error"] for request in self.having("failed")}


def drive(tmp_path, url, plan, before="") -> Result:
    return Drive(tmp_path, url, plan, before).finish()


def test_every_request_carries_its_id_and_ends_ok_with_times_in_order_and_its_tokens(
    server, tmp_path
):
    phases = [
        {"name": "growth", "requests": 20, "rate_rps": 200.0},
        {"name": "plateau", "requests": 10, "rate_rps": 100.0},
    ]
    urllib.request.urlopen(f"{server.url}/arrivals").close()
    result = drive(tmp_path, server.url, make_plan(phases=phases))
    assert result.code == 0, result.stderr
    assert result.stderr == ""
    assert len(result.having("ok")) == 30
    for request in result.requests:
        times = ["intended_ns", "sent_ns", "first_token_ns", "end_ns"]
        assert sorted(times, key=request.get) == times
        assert request["output_tokens"] == 4
    with urllib.request.urlopen(f"{server.url}/arrivals") as answer:
        sent = [request_id for _, request_id in json.load(answer)]
    assert sorted(sent) == sorted(str(request["id"]) for request in result.requests)
    growth, plateau = result.phases
    assert plateau["start_ns"] - growth["start_ns"] == 100_000_000, "no pause"
    due = sorted(request["intended_ns"] for request in result.requests)
    assert set(np.diff(due).tolist()) == {5_000_000, 10_000_000}


REASONS = [
    "no complete answer within 2 s",
    "engine is dead",
    "in-band error",
    "stream ended without [DONE]",
    "usage says 40 and 3",
]


def test_failed_requests_are_recorded_with_the_reason(server, tmp_path):
    server.set_faults("none", "hang", "http500", "inband", "truncated", "short")
    result = drive(tmp_path, server.url, make_plan(requests=60, request_timeout_s=2.0))
    server.set_faults()
    assert result.code == 2
    errors = [request["error"] for request in result.having("failed")]
    for reason in REASONS:
        assert sum(reason in error for error in errors) == 10
    assert (result.end["ok"], result.end["failed"]) == (10, 50)
    assert "50 of 60 requests failed" in result.stderr


def test_every_request_is_recorded_when_the_server_is_killed_mid_stream(tmp_path):
    with standin("--step-us", "50000") as server:
        run = Drive(tmp_path, server.url, make_plan(requests=400, rate_rps=100.0))
        run.wait_for_requests(10)
        server.process.kill()
        result = run.finish()
    assert result.code == 2
    assert result.end["ok"] >= 10
    assert result.end["ok"] + result.end["failed"] == 400
    assert any(request["first_token_ns"] for request in result.having("failed"))
    assert any("ClientConnectorError" in error for error in result.errors())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_rest_and_leaves_a_complete_file(
    slow_server, tmp_path, signum
):
    run = Drive(tmp_path, slow_server.url, make_plan(requests=1000, rate_rps=100.0))
    run.wait_for_requests(10)
    run.process.send_signal(signum)
    result = run.finish()
    assert result.code == 128 + signum
    assert result.end["ok"] >= 10
    assert result.end["failed"] == 0
    in_flight = [r for r in result.having("cancelled") if r["sent_ns"]]
    unsent = [r for r in result.having("cancelled") if not r["sent_ns"]]
    assert in_flight and unsent
    assert signum.name in result.stderr


def test_a_signal_before_the_first_request_leaves_a_complete_file(server, tmp_path):
    plan = make_plan(requests=2000, prompt_tokens=10_000)
    run = Drive(tmp_path, server.url, plan)
    run.wait_for_requests(0)
    run.process.send_signal(signal.SIGTERM)
    result = run.finish()
    assert result.code == 143
    assert result.end["cancelled"] == 2000
    assert result.end["valid"] is False


def test_a_killed_driver_leaves_whole_lines_but_for_the_last(server, tmp_path):
    run = Drive(tmp_path, server.url, make_plan(requests=2000, rate_rps=200.0))
    run.wait_for_requests(22)
    run.process.kill()
    run.process.communicate()
    *whole, torn = run.out.read_bytes().split(b"\n")
    records = [json.loads(line) for line in whole]
    assert len(records) > 20
    assert records[-1]["type"] == "request"
    assert len(torn) < 1000


def test_a_stalled_server_does_not_delay_sends(tmp_path):
    with standin() as server:
        # Request 30 of 59 freezes the server for 2 s, past the last send at 1 s.
        server.set_faults(*["none"] * 29, "freeze", *["none"] * 29)
        result = drive(tmp_path, server.url, make_plan(requests=59, rate_rps=59.0))
    assert result.code == 0, result.stderr
    stalled = max(result.requests, key=lambda r: r["end_ns"] - r["sent_ns"])
    assert stalled["end_ns"] - stalled["sent_ns"] > 2e9
    assert max(r["sent_ns"] for r in result.requests) < stalled["end_ns"]


def test_a_slow_disk_does_not_delay_sends(server, tmp_path):
    """The first write takes until the last request is sent."""
    slow_write = before_each_request("if next(before, None) is None: sent.set()")
    slow_write += """
def slow(self, lines):
    assert sent.wait(120)
    write(self, lines)
Ledger._write = slow
"""
    result = drive(tmp_path, server.url, make_plan(requests=100), slow_write)
    assert result.code == 0, result.stderr
    assert len(result.having("ok")) == 100


def test_records_that_cannot_be_written_stop_the_run(server, tmp_path):
    full_disk = """
from kvtax.load.client import Ledger
write = Ledger._write
def full(self, lines):
    if b"request" in lines and not lines.startswith(b'{"schema"'):
        raise OSError(28, "No space left on device")
    write(self, lines)
Ledger._write = full
"""
    plan = make_plan(requests=4000, rate_rps=100.0)
    run = Drive(tmp_path, server.url, plan, full_disk)
    _, stderr = run.process.communicate(timeout=300)
    assert run.process.returncode == 2
    assert "No space left on device" in stderr


def test_a_slow_event_loop_makes_the_run_invalid(server, tmp_path):
    plan = make_plan(rate_rps=100.0, lag_budget_ms=50.0)
    slow_send = before_each_request("time.sleep(0.02)")
    result = drive(tmp_path, server.url, plan, slow_send)
    assert result.code == 3
    assert result.end["ok"] == 40
    assert result.end["valid"] is False
    assert result.end["lag_ms"]["p99"] > result.end["lag_budget_ms"]
    assert "RUN NOT VALID" in result.stderr


def reset_plan() -> dict:
    growth = {"name": "growth", "requests": 10, "rate_rps": 100.0}
    hold = {"name": "hold.0.0.2", "requests": 5, "rate_rps": 100.0}
    return make_plan(phases=[growth, hold | {"reset_prefix_cache": True}])


def test_a_reset_comes_after_the_drain_and_before_the_phase(slow_server, tmp_path):
    result = drive(tmp_path, slow_server.url, reset_plan())
    assert result.code == 0, result.stderr
    after = result.phases[1]
    assert after["reset_ns"] < after["start_ns"]
    growth = [r for r in result.requests if r["phase"] == "growth"]
    assert max(r["end_ns"] for r in growth) < after["reset_ns"]
    assert min(r["sent_ns"] for r in result.requests[10:]) > after["start_ns"]


def test_a_phase_waits_for_all_answers_before_it_if_it_says_so(slow_server, tmp_path):
    phases = [
        {"name": "fill.0.1.2", "requests": 3, "rate_rps": 100.0, "output_tokens": 1},
        {"name": "fill.0.1.2.decoders", "requests": 2, "rate_rps": 100.0,
         "after_answers": True, "prompt_tokens": 16, "output_tokens": 12},
        {"name": "hold.0.1.2", "requests": 2, "rate_rps": 20.0, "prompt_tokens": 12,
         "output_tokens": 2},
    ]  # fmt: skip
    result = drive(tmp_path, slow_server.url, make_plan(phases=phases))
    assert result.code == 0, result.stderr
    filled, decoders, arrivals = (
        [r for r in result.requests if r["phase"] == phase["name"]] for phase in phases
    )
    assert max(r["end_ns"] for r in filled) < min(r["sent_ns"] for r in decoders)
    # What arrives in the hold does not wait for those that decode.
    assert max(r["sent_ns"] for r in arrivals) < min(r["end_ns"] for r in decoders)
    for phase, made in zip(phases, (filled, decoders, arrivals), strict=True):
        for request in made:
            assert request["output_tokens"] == phase["output_tokens"]
            assert request["prompt_tokens"] == phase.get("prompt_tokens", 40)


def test_cpu_time_is_read_at_both_edges_of_a_hold(tmp_path):
    with standin("--step-us", "20000") as server:
        hold = {"name": "hold.0.1.2", "requests": 2, "rate_rps": 20.0}
        growth = {"name": "growth", "requests": 2, "rate_rps": 100.0}
        phases = [growth, hold | {"after_answers": True}]
        result = drive(tmp_path, server.url, make_plan(phases=phases))
    assert result.code == 0, result.stderr
    first, last = result.cpu
    (begins_ns,) = (p["start_ns"] for p in result.phases if p["name"] == hold["name"])
    assert begins_ns <= first["t_ns"] < begins_ns + 200_000_000
    held = [r for r in result.requests if r["phase"] == hold["name"]]
    assert last["t_ns"] > max(r["end_ns"] for r in held)
    assert last["ns"] > first["ns"]
    assert first["threads"].keys() & last["threads"].keys()


def test_a_phase_pauses_before_it_if_it_says_so(server, tmp_path):
    phases = [
        {"name": "growth", "requests": 1, "rate_rps": 100.0},
        {"name": "plateau", "requests": 1, "rate_rps": 100.0, "after_answers": True,
         "pause_s": 0.5},
    ]  # fmt: skip
    result = drive(tmp_path, server.url, make_plan(phases=phases))
    (before,) = (r for r in result.requests if r["phase"] == "growth")
    assert result.phases[1]["start_ns"] - before["end_ns"] >= 500_000_000


def test_the_lag_of_what_was_not_to_be_on_time_does_not_count(server, tmp_path):
    slow_fill = before_each_request(
        "if record.phase.startswith('fill'): time.sleep(0.5)"
    )
    phases = [
        {"name": "fill.0.0.2", "requests": 4, "rate_rps": 1000.0,
         "after_answers": True},
        {"name": "hold.0.0.2", "requests": 9, "rate_rps": 50.0, "after_answers": False,
         "reset_prefix_cache": True},
    ]  # fmt: skip
    plan = make_plan(phases=phases, lag_budget_ms=450.0)
    result = drive(tmp_path, server.url, plan, slow_fill)
    assert result.code == 0, result.stderr
    assert result.end["lag_ms"]["max"] < 450
    late = make_plan(phases=[phases[0] | {"after_answers": False}], lag_budget_ms=450.0)
    (tmp_path / "requests.jsonl").unlink()
    assert drive(tmp_path, server.url, late, slow_fill).code == 3


def test_a_reset_that_did_not_happen_is_tried_again(server, tmp_path):
    server.set_faults(ignored_resets=2)
    assert drive(tmp_path, server.url, reset_plan()).code == 0


def test_a_reset_that_never_happens_fails_the_run(server, tmp_path):
    server.set_faults(ignored_resets=1000)
    soon = "import microbench.driver as r; r.RESET_TIMEOUT_S = 0.5"
    result = drive(tmp_path, server.url, reset_plan(), soon)
    server.set_faults()
    assert result.code == 4
    assert (result.end["ok"], result.end["cancelled"]) == (10, 5)
    assert "prefix cache not reset" in result.stderr
    assert len(result.phases) == 1


@pytest.mark.parametrize(
    ("written", "plan", "why"),
    [(None, {"rate": 3}, "unknown field `rate`"), ("kept", {}, "never overwritten")],
)
def test_what_is_refused_sends_and_writes_nothing(server, tmp_path, written, plan, why):
    out = tmp_path / "requests.jsonl"
    if written:
        out.write_text(written)
    run = Drive(tmp_path, server.url, make_plan(**plan))
    _, stderr = run.process.communicate()
    assert run.process.returncode == 64
    assert why in stderr
    assert (out.read_text() if out.exists() else None) == written


BURN = """
import time
def burn(s):
    end = time.thread_time() + s
    while time.thread_time() < end: pass
"""
# Each reads a line of standard input before it goes on, and then says so.
KINDS = {
    "itself": "burn(0.3)",
    "a thread that goes on": (
        "import threading\n"
        "work = lambda: (burn(0.3), print(flush=True), input())\n"
        "threading.Thread(target=work).start()"
    ),
    "a thread that ended": (
        "import threading\n"
        "thread = threading.Thread(target=burn, args=(0.3,)); thread.start()\n"
        "thread.join()"
    ),
    "a child that ended": (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', BURN + 'burn(0.3)'])"
    ),
    "a child that nobody waited for": (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', BURN + 'burn(0.3)'],"
        " stdout=subprocess.PIPE)\nchild.stdout.read()"
    ),
}
# Stands for the supervisor; the server is below it.
SUPERVISOR = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_cpu_time_counts_whoever_took_it(kind):
    server = f"BURN = {BURN!r}\nexec(BURN)\nprint(flush=True)\ninput()\n{KINDS[kind]}\n"
    server += "print(flush=True)\ninput()"
    command = [sys.executable, "-c", SUPERVISOR, server]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdin and supervisor.stdout
        supervisor.stdout.readline()
        before = read_cpu(supervisor.pid)
        supervisor.stdin.write("\n")
        supervisor.stdin.flush()
        supervisor.stdout.readline()
        if kind == "a thread that goes on":
            supervisor.stdout.readline()
        after = read_cpu(supervisor.pid)
        supervisor.stdin.write("\n\n")
    spent_s = (after.ns - before.ns) / 1e9
    # A child has an interpreter to start, which is CPU time, too.
    assert 0.29 < spent_s < 1.0
    own_ns = (
        ns - before.threads.get(thread, 0) for thread, ns in after.threads.items()
    )
    if kind == "a thread that goes on":
        assert max(own_ns) / 1e9 > 0.28


def test_a_server_that_is_gone_took_nothing_more():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert read_cpu(ended.pid).threads == {}
