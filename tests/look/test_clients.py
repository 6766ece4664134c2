# SPDX-License-Identifier: Apache-2.0
"""A client's request finds its engine's, and one that does not is counted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from made_up_clients import (
    BEFORE_US,
    WAY_BACK_US,
    WAY_THERE_US,
    drive,
    driven,
    outcome,
    replay,
    replayed,
    serve,
)

from lab.records.engine_requests import ids_of_completion
from look.__main__ import main
from look.clients import Clients, read_clients
from look.found import find
from look.instances import Instance, read_instance


def joined(folder: Path) -> tuple[list[Instance], Clients]:
    found, warnings = find(folder)
    assert warnings == []
    clients = read_clients(folder, found)
    return [clients.joined(read_instance(one)) for one in found], clients


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
        recorded = dict(
            zip(names, serve(tmp_path, sent, ids=ids).values(), strict=True)
        )
        replay(tmp_path, replayed(recorded))
    else:
        recorded = serve(tmp_path, names, ids=ids)
        drive(tmp_path, driven(recorded))
    ((instance,), clients) = joined(tmp_path)
    assert clients.warnings == instance.warnings == []
    truth = {request["id"]: outcome(request) for request in recorded.values()}
    assert instance.requests.height == len(truth) == 50
    for row in instance.requests.iter_rows(named=True):
        client = truth[row["id"]]
        for span, moment in (("ttft", "first_token_ns"), ("e2e", "end_ns")):
            us = (client[moment] - client["sent_ns"]) / 1e3
            assert row[f"client_{span}_us"] == pytest.approx(us)
            outside_us = BEFORE_US + WAY_THERE_US + WAY_BACK_US
            assert us - row[f"{span}_us"] == pytest.approx(outside_us, abs=0.5)


def test_the_table_and_the_page_say_what_lies_outside_the_engine(tmp_path, capsys):
    drive(tmp_path / "r", driven(serve(tmp_path / "r", numbers(50))))
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "r"), "--out", str(page)]) == 0
    told = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = {
        row[1]: [one.strip() for one in row if one][1:] for row in told if len(row) > 3
    }
    assert rows["of it before the engine"] == ["0.3", "0.3", "0.3"]
    assert rows["of it on the way"] == ["3.0", "3.0", "3.0"]
    data = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    (line,) = [s for s in json.loads(data)["sections"] if s["kind"] == "timeline"]
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
    names = [f"s/{number}" for number in range(20)]
    serve(tmp_path / "p", names, output_tokens=1)
    replay(tmp_path, replayed(serve(tmp_path / "d", names, output_tokens=30)))
    (d, p), clients = joined(tmp_path)
    assert (d.name, known(d), known(p)) == ("d", 20, 0)
    assert clients.warnings == []


def test_each_trial_of_a_sweep_has_its_own_driver(tmp_path):
    for number in range(3):
        folder = tmp_path / "noop" / f"r{number}"
        drive(folder, driven(serve(folder, numbers(30))))
    instances, clients = joined(tmp_path)
    assert [known(one) for one in instances] == [30, 30, 30]
    assert clients.warnings == []


@pytest.mark.parametrize("place", ["run", "run/records", "run/records/client"])
def test_a_client_s_file_is_found_above_beside_and_below(tmp_path, place):
    records = tmp_path / "run" / "records"
    asked = serve(records / "a", [f"a/{n}" for n in range(10)])
    asked |= serve(records / "b", [f"b/{n}" for n in range(10)])
    replay(tmp_path / place, replayed(asked))
    instances, clients = joined(records)
    assert [known(one) for one in instances] == [10, 10]
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


def test_two_clients_of_one_id_are_not_told_apart(tmp_path):
    asked = driven(serve(tmp_path, numbers(10)))
    drive(tmp_path, [*asked, asked[4]])
    ((instance,), clients) = joined(tmp_path)
    assert known(instance) == 9
    assert kinds(clients)["client_several"].startswith("2 requests")


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_those_that_failed_are_counted_and_in_no_figure(tmp_path, status):
    asked = driven(serve(tmp_path, numbers(10)))
    asked[3].status, asked[3].error = status, "no complete answer"
    asked[4].first_token_ns = None
    drive(tmp_path, asked)
    ((instance,), clients) = joined(tmp_path)
    assert known(instance) == 8
    assert kinds(clients) == {
        "client_failed": "2 requests of clients were not answered in full"
    }


def test_one_that_its_engine_never_ended_is_unmatched(tmp_path):
    drive(tmp_path, driven(serve(tmp_path, numbers(10))))
    path = tmp_path / "engine_request.jsonl"
    path.write_text(path.read_text().replace('"finished_ns"', '"unknown"', 1))
    ((instance,), clients) = joined(tmp_path)
    assert known(instance) == instance.requests.height == 9
    assert kinds(clients)["client_unmatched"].startswith("1 requests")


def test_what_its_engine_does_not_know_of_a_first_token_hides_no_client(tmp_path):
    drive(tmp_path, driven(serve(tmp_path, numbers(10))))
    path = tmp_path / "engine_request.jsonl"
    path.write_text(path.read_text().replace('"first_token_step"', '"unknown"', 1))
    ((instance,), clients) = joined(tmp_path)
    assert instance.requests["ttft_us"].null_count() == 1
    assert known(instance) == 10
    assert clients.warnings == []


def test_an_engine_that_recorded_no_requests_leaves_all_unmatched(tmp_path):
    drive(tmp_path, driven(serve(tmp_path, numbers(10))))
    (tmp_path / "engine_request.jsonl").unlink()
    ((instance,), clients) = joined(tmp_path)
    assert known(instance) == 0
    assert kinds(clients)["client_unmatched"].startswith("10 requests")


def test_a_client_that_took_less_time_than_the_engine_is_of_another_run(tmp_path):
    asked = driven(serve(tmp_path, numbers(10)))
    asked[6].end_ns = asked[6].sent_ns + 1
    drive(tmp_path, asked)
    ((instance,), clients) = joined(tmp_path)
    assert clients.warnings == []
    (warning,) = instance.warnings
    assert warning.message == "1 requests took the client less time than the engine"
    assert known(instance) == 9
    assert instance.requests.height == 10


def test_a_torn_last_line_of_a_client_is_counted(tmp_path):
    path = drive(tmp_path, driven(serve(tmp_path, numbers(10))))
    path.write_bytes(path.read_bytes()[:-9])
    ((instance,), clients) = joined(tmp_path)
    assert known(instance) == 10
    assert kinds(clients) == {"torn_lines": "requests.jsonl: torn last line left out"}


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
    change, told = BAD[bad]
    files[client].write_text(change(files[client].read_text()))
    instances, clients = joined(tmp_path)
    assert sorted(known(one) for one in instances) == [0, 10]
    (message,) = [kinds(clients)["client_unreadable"]]
    assert f"{client}.jsonl" in message
    assert told in message
    assert main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert f"{client}.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(5))
def test_every_request_of_a_client_is_joined_or_counted(tmp_path, seed):
    """Whatever is repeated, lost or given up."""
    chance = random.Random(seed)
    asked = driven(serve(tmp_path, numbers(60), seed=seed))
    for one in asked:
        if chance.random() < 0.2:
            one.status = chance.choice(["failed", "cancelled"])
        if chance.random() < 0.2:
            one.id = chance.randrange(100)
        if chance.random() < 0.1:
            one.output_tokens += 1
    drive(tmp_path, asked)
    ((instance,), clients) = joined(tmp_path)
    counted = sum(int(told.split()[0]) for told in kinds(clients).values())
    assert known(instance) + counted == 60
    lone = {(one.id, one.prompt_tokens, one.output_tokens) for one in asked}
    assert 0 < known(instance) <= len(lone)


def test_an_id_is_hashed_as_the_patch_does():
    # printf cmpl-s/0-0 | b2sum -l 64; tests/patched/ has the patch say the same.
    assert ids_of_completion("s/0") == ("cmpl-s/0-0", "8eddeece075d824a")
