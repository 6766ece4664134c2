# SPDX-License-Identifier: Apache-2.0
"""A client's request finds its engine's, and one that does not is counted."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvtax.look.clients import Clients, read_clients
from kvtax.look.discover import discover
from kvtax.look.instances import Instance, read_instance
from kvtax.records.requests import (
    DriverEnd,
    PhaseStart,
    ReplayedRequest,
    ReplayEnd,
    ReplayHeader,
    RequestRecord,
    RequestsHeader,
    hashed_id,
    ids_of_completion,
)
from tests.look.conftest import flat, main, page_data
from tests.look.made_up_server import served

# What every request waited for outside its engine.
BEFORE_US, WAY_THERE_US, WAY_BACK_US = 300, 1_000, 2_000
ENDED = {"scheduled": 0, "ok": 0, "failed": 0, "cancelled": 0}


def serve(
    folder: Path,
    names: Sequence[str],
    *,
    ids: str = "hashed",
    seed: int = 1,
    output_tokens: int | None = None,
) -> dict[str, dict]:
    """A server of requests with these X-Request-Ids: what it recorded of each."""
    server = served(folder, steps=8 * len(names), seed=seed)
    server.header["ids"] = ids
    assert len(server.requests) == len(names)
    for name, request in zip(names, server.requests, strict=True):
        request["id"] = ids_of_completion(name)[ids == "hashed"]
        request["before_engine_us"] = BEFORE_US
        if output_tokens is not None:
            request["output_tokens"] = output_tokens
    for request in server.requests:
        request["ttft_ends_ns"] = server.ends_ns(request["first_token_step"])
        request["e2e_ends_ns"] = server.ends_ns(request["last_step"])
    server.write()
    return dict(zip(names, server.requests, strict=True))


def outcome(request: dict) -> dict:
    """How it went for its client."""
    outside_ns = (BEFORE_US + WAY_THERE_US) * 1_000
    return {
        "status": "ok",
        "sent_ns": request["arrival_ns"] - outside_ns,
        "first_token_ns": request["ttft_ends_ns"] + WAY_BACK_US * 1_000,
        "end_ns": request["e2e_ends_ns"] + WAY_BACK_US * 1_000,
    }


def driven(requests: dict[str, dict]) -> list[RequestRecord]:
    return [
        RequestRecord(
            id=int(name),
            phase="growth",
            prompt_tokens=request["prompt_tokens"],
            output_tokens=request["output_tokens"],
            **outcome(request),
        )
        for name, request in requests.items()
    ]


def replayed(requests: dict[str, dict]) -> list[ReplayedRequest]:
    return [
        ReplayedRequest(
            id=name,
            session=name.partition("/")[0],
            turn=0,
            usage_prompt_tokens=request["prompt_tokens"],
            usage_completion_tokens=request["output_tokens"],
            **outcome(request),
        )
        for name, request in requests.items()
    ]


def ms(request: dict) -> tuple[float, float]:
    """The client's TTFT and E2E."""
    answered = outcome(request)
    return tuple(
        (answered[moment] - answered["sent_ns"]) / 1e6
        for moment in ("first_token_ns", "end_ns")
    )


def vllm_bench(path: Path, requests: dict[str, dict], **more) -> Path:
    """What `vllm bench serve --save-result --save-detailed` writes."""
    times = [ms(request) for request in requests.values()]
    return write_json(
        path,
        {
            "date": "20261125-101010",
            "backend": "openai",
            "num_prompts": len(times),
            "completed": len(times),
            **more,
            "input_lens": [5] * len(times),
            "output_lens": [6] * len(times),
            "ttfts": [ttft / 1e3 for ttft, _ in times],
            "itls": [[(e2e - ttft) / 2e3] * 2 for ttft, e2e in times],
            "start_times": [353399.7] * len(times),
            "generated_texts": ["input_lens"] * len(times),
            "errors": [""] * len(times),
        },
    )


def write_json(path: Path, *lines: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def write_lines(path: Path, *lines: msgspec.Struct) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def drive(folder: Path, records: list[RequestRecord]) -> Path:
    head = (RequestsHeader(scheduled=len(records)), PhaseStart("growth", 0))
    return write_lines(folder / "requests.jsonl", *head, *records, DriverEnd(**ENDED))


def replay(folder: Path, records: list[ReplayedRequest]) -> Path:
    return write_lines(
        folder / "replay.jsonl", ReplayHeader(), *records, ReplayEnd(**ENDED)
    )


def joined(folder: Path) -> tuple[list[Instance], Clients]:
    discovered, warnings = discover(folder)
    assert warnings == []
    clients = read_clients(folder, discovered)
    return [clients.joined(read_instance(source)) for source in discovered], clients


def kinds(clients: Clients) -> dict[str, str]:
    return {warning.kind: warning.message for warning in clients.warnings}


def known(instance: Instance) -> int:
    """Of how many of its requests a client told."""
    if "client_e2e_us" not in instance.requests.columns:
        return 0
    return instance.requests["client_e2e_us"].count()


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


SESSIONS = [f"a session, {number}%/é/{number}" for number in range(50)]


@pytest.mark.parametrize("ids", ["hashed", "plain"])
@pytest.mark.parametrize("names", [numbers(50), SESSIONS], ids=["driver", "replayer"])
def test_each_request_gets_what_its_own_client_saw(tmp_path, ids, names):
    if names is SESSIONS:
        # A header has no letter beyond ASCII, and no bare percent sign.
        sent = [f"a session, {n}%25/%C3%A9/{n}" for n in range(50)]
        requests = serve(tmp_path, sent, ids=ids).values()
        recorded = dict(zip(names, requests, strict=True))
        replay(tmp_path, replayed(recorded))
    else:
        recorded = serve(tmp_path, names, ids=ids)
        drive(tmp_path, driven(recorded))
    ((instance,), clients) = joined(tmp_path)
    assert clients.warnings == instance.warnings == []
    assert instance.requests.height == 50
    truth = {request["id"]: request for request in recorded.values()}
    for row in instance.requests.iter_rows(named=True):
        outside_us = BEFORE_US + WAY_THERE_US + WAY_BACK_US
        for span, of_client_ms in zip(
            ("ttft", "e2e"), ms(truth[row["id"]]), strict=True
        ):
            us = row[f"client_{span}_us"]
            assert us == pytest.approx(1e3 * of_client_ms)
            assert us - row[f"{span}_us"] == pytest.approx(outside_us, abs=0.5)


def test_the_table_and_the_page_say_what_lies_outside_the_engine(tmp_path, capsys):
    drive(tmp_path / "r", driven(serve(tmp_path / "r", numbers(50))))
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "r"), "--out", str(page)]) == 0
    lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    rows = {row[1]: row[2:] for row in lines if len(row) > 3 and "of it" in row[1]}
    assert rows["of it before the engine"] == ["0.3", "0.3", "0.3"]
    assert rows["of it on the way"] == ["3.0", "3.0", "3.0"]
    (line,) = [s for s in flat(page_data(page)["sections"]) if s["kind"] == "timeline"]
    columns = line["requests"]["columns"]
    for i in range(50):
        parts = ("before the engine ms", "E2E ms", "on the way ms")
        whole = sum(columns[part][i] for part in parts)
        assert columns["client's E2E ms"][i] == pytest.approx(whole, abs=0.01)
        assert columns["on the way ms"][i] == pytest.approx(3, abs=0.01)


def test_without_clients_nothing_is_said_of_them(tmp_path, capsys):
    serve(tmp_path / "r", numbers(5))
    assert main([str(tmp_path / "r"), "--out", str(tmp_path / "page.html")]) == 0
    assert "clients waited" not in capsys.readouterr().out
    assert "client's" not in (tmp_path / "page.html").read_text()


def test_a_prefill_elsewhere_is_not_what_the_client_waited_for(tmp_path):
    names = [f"s/{number}" for number in range(50)]
    serve(tmp_path / "p", names, output_tokens=1)
    sent = serve(tmp_path / "d", names, output_tokens=30)
    replay(tmp_path, replayed(sent))
    (d, p), clients = joined(tmp_path)
    assert (d.name, known(d), known(p)) == ("d", 50, 0)
    assert clients.warnings == []


def test_trials_of_a_sweep_show_their_requests(tmp_path, capsys):
    """The driver's file lies beside the folder of the engine's life."""
    for number in range(3):
        trial = tmp_path / "run" / "noop" / f"r{number}"
        life = trial / f"20261125T183022.123456Z-host-dp0-7{number}"
        drive(trial, driven(serve(life, numbers(30))))
    instances, clients = joined(tmp_path / "run")
    assert [known(instance) for instance in instances] == [30, 30, 30]
    assert clients.warnings == []
    assert main([str(trial), "--out", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert ", 30 requests" in printed
    assert "waited most" in printed and "client's E2E" in printed
    assert "Warnings" not in printed


@pytest.mark.parametrize("place", ["run", "run/records", "run/records/client"])
def test_a_client_s_file_is_found_above_beside_and_below(tmp_path, place):
    records = tmp_path / "run" / "records"
    asked = serve(records / "a", [f"a/{n}" for n in range(10)])
    asked |= serve(records / "b", [f"b/{n}" for n in range(10)])
    replay(tmp_path / place, replayed(asked))
    instances, clients = joined(records)
    assert [known(instance) for instance in instances] == [10, 10]
    assert clients.warnings == []


def test_those_that_match_none_or_several_are_counted(tmp_path):
    once, twice = numbers(20), numbers(30)[20:]
    asked = serve(tmp_path / "a", once + twice, output_tokens=7)
    again = serve(tmp_path / "b", twice, output_tokens=7)
    for name in twice:
        assert again[name]["id"] == asked[name]["id"]
        again[name]["prompt_tokens"] = asked[name]["prompt_tokens"]
    path = tmp_path / "b" / "engine_request.jsonl"
    head, *_ = path.read_text().splitlines()
    path.write_text("\n".join([head, *map(json.dumps, again.values())]) + "\n")
    strangers = driven({"900": asked["0"], "901": asked["1"], "902": asked["2"]})
    drive(tmp_path, [*driven(asked), *strangers])
    (a, b), clients = joined(tmp_path)
    assert (known(a), known(b)) == (20, 0)
    assert kinds(clients) == {
        "client_unmatched": "3 requests of clients are none that an engine recorded",
        "client_several": "10 requests of clients may each be several that an engine "
        "recorded",
    }


def unknown(folder: Path, field: str) -> None:
    path = folder / "engine_request.jsonl"
    path.write_text(path.read_text().replace(f'"{field}"', '"unknown"', 1))


def set_all(record: RequestRecord, **fields: object) -> None:
    for name, value in fields.items():
        setattr(record, name, value)


WAY_NS = (WAY_THERE_US + WAY_BACK_US) * 1_000
# What is spoilt of ten requests; how many a client told of, and the others by kind.
SPOILT = {
    "one id twice": (
        lambda sent, _: sent.append(sent[4]), 9, {"client_several": "2 requests"}
    ),
    "failed": (
        lambda sent, _: set_all(sent[3], status="failed", error="no answer"),
        9, {"client_failed": "1 requests of clients were not answered in full"},
    ),
    "cancelled": (
        lambda sent, _: set_all(sent[3], status="cancelled"),
        9, {"client_failed": "1 requests"},
    ),
    "no token": (
        lambda sent, _: set_all(sent[4], first_token_ns=None),
        9, {"client_failed": "1 requests"},
    ),
    "never ended": (
        lambda _, folder: unknown(folder, "finished_ns"),
        9, {"client_unmatched": "1 requests", "unended_requests": "1 "},
    ),
    "no first token in the engine": (
        lambda _, folder: unknown(folder, "first_token_step"), 10, {}
    ),
    "no file of requests": (
        lambda _, folder: (folder / "engine_request.jsonl").unlink(),
        0, {"client_unmatched": "10 requests"},
    ),
    "shorter than in the engine": (
        lambda sent, _: set_all(sent[6], end_ns=sent[6].sent_ns + 1),
        9, {"client_shorter": "1 requests took the client less time than the engine"},
    ),
    # A client measures what the server did before its engine, too.
    "no time for the way": (
        lambda sent, _: set_all(sent[6], end_ns=sent[6].end_ns - WAY_NS - 1),
        9, {"client_shorter": "1 requests"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_request_that_cannot_be_joined_is_counted_and_hides_no_other(
    tmp_path, spoilt
):
    sent = driven(serve(tmp_path, numbers(10)))
    spoil, joins, messages = SPOILT[spoilt]
    spoil(sent, tmp_path)
    drive(tmp_path, sent)
    ((instance,), clients) = joined(tmp_path)
    assert known(instance) == joins
    warnings = {
        warning.kind: warning for warning in (*clients.warnings, *instance.warnings)
    }
    assert warnings.keys() == messages.keys()
    for kind, message in messages.items():
        assert warnings[kind].message.startswith(message)
    if spoilt == "no file of requests":
        remedy = warnings["client_unmatched"].remedy
        assert "there is no engine_request.jsonl" in remedy


def test_a_torn_last_line_of_a_client_is_counted(tmp_path):
    path = drive(tmp_path, driven(serve(tmp_path, numbers(10))))
    path.write_bytes(path.read_bytes()[:-9])
    ((instance,), clients) = joined(tmp_path)
    assert known(instance) == 10
    assert [(w.kind, w.place) for w in clients.warnings] == [
        ("torn_lines", "requests.jsonl")
    ]


BAD = {
    "empty": (lambda text: "", ":1: no header line"),
    "no JSON": (lambda text: text.replace("\n", "\n{{\n", 3), ":2: bad record"),
    "other schema": (lambda text: text.replace("/1", "/9", 1), "/9"),
    "NaN": (lambda text: text.replace('"sent_ns":', '"sent_ns":NaN,"x":', 1), "bad"),
    "no record": (lambda text: text.replace("\n", "\nnull\n", 1), ":2: bad record"),
    "wrong type": (lambda text: text.replace('"end_ns":', '"end_ns":"', 1), "bad"),
}


@pytest.mark.slow
@pytest.mark.parametrize("client", ["requests", "replay"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_file_of_a_client_is_named_and_the_others_are_joined(
    tmp_path, bad, client, capsys
):
    asked = serve(tmp_path / "a", numbers(10))
    files = {
        "requests": drive(tmp_path / "a", driven(asked)),
        "replay": replay(
            tmp_path / "b",
            replayed(serve(tmp_path / "b", [f"s/{n}" for n in range(10)])),
        ),
    }
    change, expected = BAD[bad]
    files[client].write_text(change(files[client].read_text()))
    instances, clients = joined(tmp_path)
    assert sorted(known(instance) for instance in instances) == [0, 10]
    message = kinds(clients)["client_unreadable"]
    assert f"{client}.jsonl" in message
    assert expected in message
    assert main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert f"{client}.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(5))
def test_every_request_of_a_client_is_joined_or_counted(tmp_path, seed):
    """Whatever is repeated, lost or given up."""
    chance = random.Random(seed)
    asked = driven(serve(tmp_path, numbers(60), seed=seed))
    for request in asked:
        if chance.random() < 0.2:
            request.status = chance.choice(["failed", "cancelled"])
        if chance.random() < 0.2:
            request.id = chance.randrange(100)
        if chance.random() < 0.1:
            request.output_tokens += 1
    drive(tmp_path, asked)
    ((instance,), clients) = joined(tmp_path)
    counted = sum(int(message.split()[0]) for message in kinds(clients).values())
    assert known(instance) + counted == 60
    lone = {
        (request.id, request.prompt_tokens, request.output_tokens) for request in asked
    }
    assert 0 < known(instance) <= len(lone)


def test_an_id_is_hashed_as_the_patch_does():
    # printf cmpl-s/0-0 | b2sum -l 64; tests/patched/ has the patch say the same.
    assert ids_of_completion("s/0") == ("cmpl-s/0-0", "8eddeece075d824a")


def as_chats(folder: Path, names: list[str]) -> None:
    """Have the server's requests be chats."""
    path = folder / "engine_request.jsonl"
    text = path.read_text()
    for name in names:
        chat = hashed_id(f"chatcmpl-{name}")
        text = text.replace(ids_of_completion(name)[1], chat)
    path.write_text(text)


BENCH = [f"bench-{number}" for number in range(50)]
OTHERS = {
    "bench, prefix": lambda path, sent: vllm_bench(
        path / "openai-infqps.json", sent, request_id_prefix="bench-"
    ),
    "bench, ids": lambda path, sent: vllm_bench(
        path / "result.json", sent, request_ids=list(sent)
    ),
}


@pytest.mark.parametrize("kind", ["completions", "chats"])
@pytest.mark.parametrize("client", OTHERS)
def test_requests_of_vllm_bench_are_joined(tmp_path, client, kind, capsys):
    recorded = serve(tmp_path / "records", BENCH)
    if kind == "chats":
        as_chats(tmp_path / "records", BENCH)
    OTHERS[client](tmp_path, recorded)
    ((instance,), clients) = joined(tmp_path / "records")
    assert clients.warnings == instance.warnings == []
    assert known(instance) == 50
    in_order = sorted(recorded, key=lambda name: recorded[name]["arrival_ns"])
    rows = instance.requests.sort("arrival_ns").rows(named=True)
    for name, row in zip(in_order, rows, strict=True):
        assert row["client_id"].removeprefix("chat").removeprefix("cmpl-") == name
        us = [row["client_ttft_us"], row["client_e2e_us"]]
        assert us == pytest.approx([1e3 * of for of in ms(recorded[name])])
    assert main([str(tmp_path / "records"), "--out", str(tmp_path / "page.html")]) == 0
    slowest = instance.requests.sort("client_e2e_us").row(-1, named=True)
    (line,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(f"{slowest['client_id']} ") and " to " in line
    ]
    assert line.endswith(f"  {slowest['first_step']} to {slowest['last_step']}")


def test_a_client_without_ids_says_what_would_give_them(tmp_path):
    vllm_bench(tmp_path / "result.json", serve(tmp_path / "r", BENCH))
    ((instance,), clients) = joined(tmp_path)
    assert known(instance) == 0
    (warning,) = clients.warnings
    assert warning.message == "50 requests have no id by which the server knows them"
    assert "--metadata request_id_prefix" in warning.remedy


SGLANG = {
    "backend": "vllm-chat",
    "dataset_name": "random",
    "request_rate": float("inf"),
    "completed": 2,
    "input_lens": [10, 12],
    "output_lens": [5, 6],
    "ttfts": [0.01, 0.02],
    "itls": [[0.01] * 4, [0.01] * 5],
    "errors": ["", ""],
}
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "errors")
REFUSED = {
    "sglang.bench_serving": SGLANG,
    "sglang.bench_serving without": {
        name: value for name, value in SGLANG.items() if name not in DETAILS
    },
    "without --save-detailed": {"request_rate": 8, "completed": 2, "num_prompts": 2},
    "guidellm": {"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": []},
    "aiperf": {
        "metadata": {"x_request_id": "1", "request_start_ns": 1},
        "metrics": {},
    },
}


@pytest.mark.parametrize("program", REFUSED)
@pytest.mark.parametrize("file", ["result.json", "rate_inf.jsonl"])
def test_a_file_of_another_program_is_named_with_the_reason(
    tmp_path, program, file, capsys
):
    serve(tmp_path / "r", BENCH)
    write_json(tmp_path / "r" / file, REFUSED[program])
    assert main([str(tmp_path / "r"), "--out", str(tmp_path / "page.html")]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert file in out
    assert program.removesuffix(" without") in out
    assert "not read, because" in out
    assert "malformed" not in out


def test_documents_that_only_resemble_a_client_s_are_none(tmp_path):
    serve(tmp_path / "r", BENCH)
    (tmp_path / "r" / "config.json").write_text('{"x_request_id": 1, "benchmarks": []}')
    (tmp_path / "r" / "notes.json").write_text("{")
    (tmp_path / "r" / "binary.json").write_bytes(b"\xff\x00" * 99)
    ((instance,), clients) = joined(tmp_path)
    assert clients.warnings == []
    assert known(instance) == 0


def test_results_whose_lists_differ_are_named_and_hide_nothing(tmp_path, capsys):
    sent = serve(tmp_path / "records", BENCH)
    path = vllm_bench(tmp_path / "records" / "result.json", sent)
    result = json.loads(path.read_text())
    result["ttfts"].pop()
    path.write_text(json.dumps(result))
    assert main([str(tmp_path / "records"), "--out", str(tmp_path / "o.html")]) == 2
    printed = capsys.readouterr().out
    assert f"{path}:1: lists of different lengths" in printed
    assert ", 50 requests" in printed


@pytest.mark.parametrize("layout", ["long", "indented", "appended"])
def test_a_long_or_indented_result_of_vllm_bench_is_joined(tmp_path, layout):
    recorded = serve(tmp_path / "records", BENCH)
    more = {"request_id_prefix": "bench-"}
    if layout == "long":
        more["notes"] = "x" * 200_000
    path = vllm_bench(tmp_path / "r.json", recorded, **more)
    if layout == "indented":
        path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    if layout == "appended":
        with path.open("a") as file:
            file.write(vllm_bench(tmp_path / "none", {}, **more).read_text())
    ((instance,), clients) = joined(tmp_path / "records")
    assert clients.warnings == instance.warnings == []
    assert known(instance) == 50
