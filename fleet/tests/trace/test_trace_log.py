# SPDX-License-Identifier: Apache-2.0
"""A request log is read as its requests; `kvtax trace anonymise` keeps no text."""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fleet.tests.trace.trace_commands import fails, put, run, stats
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtax.paths import REPOSITORY
from tokenizers import Tokenizer, models, pre_tokenizers

from kvtax_fleet.trace import Request, TraceError, read_trace

pytestmark = pytest.mark.usefixtures("signals")

SYSTEM = "You are a coding agent. " * 20
ASK = {"role": "user", "content": "Why does the build fail? " * 10}
ANSWER = {"role": "assistant", "content": "Because of a missing header. " * 5}
MORE = {"role": "user", "content": "Then add it. " * 10}
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]


def line(time: float | str, body: dict, **more: object) -> dict:
    return {"timestamp": time, "body": body, "usage": {"completion_tokens": 7}} | more


def chat(*messages: dict, **more: object) -> dict:
    system = {"role": "system", "content": SYSTEM}
    return {"model": "m", "messages": [system, *messages], **more}


def read(tmp_path: Path, *rows: dict, **options: object) -> list[Request]:
    return list(read_trace(put(tmp_path / "log.jsonl", *rows), **options))


def test_a_conversation_becomes_a_session_whose_prompts_begin_with_each_other(tmp_path):
    first, second = read(
        tmp_path, line(1000.5, chat(ASK)), line(1010, chat(ASK, ANSWER, MORE))
    )
    assert (first.session, first.turn, first.think_s) == ("s0", 0, None)
    assert (second.session, second.turn, second.think_s) == ("s0", 1, 9.5)
    assert (first.arrival_s, second.arrival_s) == (0, 9.5)
    assert first.output_tokens == 7
    assert len(second.hashes) > len(first.hashes) > 10
    assert second.hashes[: len(first.hashes)] == first.hashes


ANTHROPIC = {
    "model": "m",
    "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "e"}}],
    "tools": TOOLS,
}
RESPONSES = {"model": "m", "instructions": SYSTEM, "tools": TOOLS}
ANSWERED = {"type": "message", "role": "assistant", "content": ["done"]}
TWO_TURNS = {
    "chat": (chat(ASK, tools=TOOLS), chat(ASK, ANSWER, MORE, tools=TOOLS)),
    "chat with parts": tuple(
        chat({"role": "user", "content": [{"type": "text", "text": SYSTEM}]}, *rest)
        for rest in ([], [ANSWER, MORE])
    ),
    # The mark of what may be cached moves on with each turn.
    "messages": tuple(
        ANTHROPIC
        | {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": SYSTEM} | mark],
                },
                *rest,
            ]
        }
        for mark, rest in (({"cache_control": {"type": "e"}}, []), ({}, [ANSWER, MORE]))
    ),
    "responses": (
        RESPONSES | {"input": [ASK]},
        RESPONSES | {"input": [ASK, ANSWERED, MORE]},
    ),
    "a text": ({"prompt": SYSTEM}, {"prompt": SYSTEM + "And then? " * 20}),
    "a text in a list": ({"prompt": [SYSTEM]}, {"prompt": [SYSTEM + SYSTEM]}),
    "ids": ({"prompt": [*range(50)]}, {"prompt": [*range(90)]}),
}


@pytest.mark.parametrize("form", TWO_TURNS)
def test_every_kind_of_body_is_read_and_its_next_turn_is_found(tmp_path, form):
    first, second = read(
        tmp_path, *(line(at, body) for at, body in enumerate(TWO_TURNS[form]))
    )
    assert (second.session, second.turn) == (first.session, 1)
    shared = len(first.hashes)
    assert shared >= 3
    assert second.hashes[:shared] == first.hashes
    assert len(second.hashes) > shared


def test_ids_are_counted_and_cut_exactly(tmp_path):
    (request,) = read(tmp_path, line(0, {"prompt": [*range(50)]}), block_tokens=16)
    assert (request.input_tokens, len(request.hashes)) == (50, 3)


def test_sessions_share_what_they_begin_with_and_no_more(tmp_path):
    other = {"role": "user", "content": "Something else. " * 10}
    one, two = read(tmp_path, line(0, chat(ASK)), line(1, chat(other)))
    assert one.session != two.session
    same = sum(a == b for a, b in zip(one.hashes, two.hashes, strict=False))
    # The system prompt, in blocks of 16 tokens of 4 characters.
    assert same == len("\ncontent \nrole system" + SYSTEM) // 64
    # One letter, and nothing after it is the same.
    changed = line(2, chat({**ASK, "content": "w" + ASK["content"][1:]}))
    one, three = read(tmp_path, line(0, chat(ASK)), changed)
    assert one.hashes[same + 1 :]
    assert not set(one.hashes[same + 1 :]) & set(three.hashes)


def test_equal_first_prompts_are_two_sessions(tmp_path):
    names = {one.session for one in read(tmp_path, *[line(0, chat(ASK))] * 2)}
    assert len(names) == 2


def test_a_session_that_the_log_names_is_one_whatever_its_prompts_are(tmp_path):
    rows = [
        line(0, chat(ASK), session_id="x"),
        line(1, chat(ASK), metadata={"session_id": "y"}),
        line(2, chat(MORE), conversation_id="x"),
    ]
    assert [(r.session, r.turn) for r in read(tmp_path, *rows)] == [
        ("s0", 0),
        ("s1", 0),
        ("s0", 1),
    ]


def test_a_session_that_is_no_name_is_none(tmp_path):
    names = (False, "", None, {}, 0, {"id": 0})
    rows = [line(at, chat(ASK), session=name) for at, name in enumerate(names)]
    sessions = [request.session for request in read(tmp_path, *rows)]
    assert sessions == ["s0", "s1", "s2", "s3", "s4", "s4"]


def nested(body: dict) -> dict:
    return {"request": {"method": "POST", "body": json.dumps(body)}}


OPENAI = {"usage": {"prompt_tokens": 90, "completion_tokens": 5}, "choices": []}
CACHED = {"input_tokens": 1, "cache_read_input_tokens": 9, "output_tokens": 5}
BARE = line(0, chat(ASK))
del BARE["usage"]
WRITTEN = {
    "gateway": {"time": 0, "response_body": json.dumps(OPENAI)} | nested(chat(ASK)),
    "body in a string": {**BARE, "body": json.dumps(chat(ASK)), "response": OPENAI},
    "flat": {"ts": 0, "output_tokens": 5, **chat(ASK)},
    "anthropic": {**BARE, "answer": {"usage": CACHED}},
    "answer only": {**BARE, "output": "x" * 20},
    "a benchmark's row": {"timestamp": 0, "output_length": 5, **chat(ASK)},
    "a good status": {**line(0, chat(ASK)), "usage": OPENAI["usage"], "status": 200}
    | {"error": None, "response": {"status": "completed", "error": None}},
}


@pytest.mark.parametrize("how", WRITTEN)
def test_fields_are_found_under_their_common_names(tmp_path, how):
    (request,) = read(tmp_path, WRITTEN[how])
    (usual,) = read(tmp_path, line(0, chat(ASK)))
    assert request.output_tokens == 5
    assert request.hashes == usual.hashes


@pytest.mark.parametrize(
    "times",
    [
        (1767225600, 1767225602.5),
        ("1767225600", "1767225602.5"),
        (1767225600_000, 1767225602_500),
        (1767225600_000_000, 1767225602_500_000),
        (1767225600_000_000_000, 1767225602_500_000_000),
        ("2026-01-01T00:00:00Z", "2026-01-01T01:00:02.500+01:00"),
        ("2026-01-01T00:00:00", "2026-01-01 00:00:02.5"),
    ],
)
def test_times_of_any_common_kind_are_read(tmp_path, times):
    _, second = read(tmp_path, *(line(at, chat(ASK)) for at in times))
    assert second.arrival_s == 2.5


@pytest.mark.parametrize("ended", [{"end_time": 4.5}, {"latency_ms": 3500}])
def test_think_time_counts_from_the_end_of_the_answer_where_it_is_known(
    tmp_path, ended
):
    rows = (line(1, chat(ASK), **ended), line(10, chat(ASK, ANSWER, MORE)))
    assert read(tmp_path, *rows)[1].think_s == 5.5


def test_lines_in_order_of_their_ends_come_in_order_of_arrival(tmp_path):
    rows = [line(at, chat(ASK), session_id=at) for at in (9, 3, 500, 4)]
    arrivals = [request.arrival_s for request in read(tmp_path, *rows)]
    assert arrivals == [0, 1, 6, 497]
    with pytest.raises(TraceError, match=r"line 3: .* over 600 s before .* sort the"):
        read(tmp_path, rows[0], line(700, chat(ASK)), line(8, chat(ASK)))


def test_pictures_count_by_what_they_are_not_by_their_length(tmp_path):
    def picture(data: str) -> dict:
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;{data}"}}
        return chat({"role": "user", "content": [url]})

    one, two, three = (
        read(tmp_path, line(0, picture(data)))[0] for data in ("a", "a" * 9999, "a")
    )
    assert one.input_tokens == two.input_tokens
    assert one.hashes != two.hashes
    assert one.hashes == three.hashes


@pytest.mark.parametrize("item", ["encrypted_content", "signature", "data"])
def test_what_no_model_reads_as_text_counts_little(tmp_path, item):
    body = {"input": [{"type": "reasoning", item: "A" * 40_000}, ASK]}
    (request,) = read(tmp_path, line(0, body))
    (plain,) = read(tmp_path, line(0, {"input": [ASK]}))
    assert request.input_tokens - plain.input_tokens < 30


@pytest.mark.parametrize(
    "where",
    [
        {"path": "/v1/messages/count_tokens"},
        {"url": "https://host:1/tokenize?x=1"},
        {"path": "/v1/embeddings"},
        {"endpoint": "/v2/rerank/"},
        {"call_type": "aembedding"},
        {"response_body": {"input_tokens": 9}},
        {"response_body": {"object": "list", "data": [{"embedding": [0.5]}]}},
    ],
)
def test_a_request_that_generates_nothing_is_left_out(tmp_path, where):
    left_out: Counter[str] = Counter()
    rows = line(0, chat(ASK), **where), line(1, chat(ASK))
    (request,) = read(tmp_path, *rows, left_out=left_out)
    assert request.arrival_s == 0
    assert left_out == {"a request to an endpoint that generates nothing": 1}


@pytest.mark.parametrize(
    "where",
    [
        {"path": "/v1/chat/completions"},
        {"url": "https://host/v1/messages?beta=true"},
        {"url": "https://api.openai.com/v1"},
        {"path": "/openai/deployments/m/chat/completions/"},
        {"url": "https://g/v1beta/models/m:streamGenerateContent"},
        {"call_type": "acompletion"},
        {"endpoint": "responses"},
    ],
)
def test_a_request_that_generates_is_read(tmp_path, where):
    assert len(read(tmp_path, line(0, chat(ASK), **where))) == 1


@pytest.mark.parametrize("name", ["previous_response_id", "conversation"])
def test_what_continues_a_stored_response_is_left_out(tmp_path, name):
    left_out: Counter[str] = Counter()
    rows = line(0, {"input": [ASK]}), line(1, {"input": [MORE], name: "r1"})
    assert len(read(tmp_path, *rows, left_out=left_out)) == 1
    assert list(left_out) == ["it continues a stored response, whose text is elsewhere"]


def test_an_estimate_far_from_the_usage_is_named(tmp_path, caplog):
    usage = {"prompt_tokens": 9_000, "completion_tokens": 7}
    read(tmp_path, line(0, chat(ASK), usage=usage), line(1, chat(ASK)))
    assert "in 1 lines the usage counts" in caplog.text and "9,000" in caplog.text
    caplog.clear()
    usage["prompt_tokens"] = 200
    read(tmp_path, line(0, chat(ASK), usage=usage))
    assert not caplog.text


def test_estimated_tokens_follow_the_stated_characters(tmp_path):
    row = line(0, {"prompt": "x" * 6400})
    (four,) = read(tmp_path, row)
    (other,) = read(tmp_path, row, chars_per_token=3.3)
    assert (four.input_tokens, len(four.hashes)) == (1600, 100)
    assert other.input_tokens == pytest.approx(6400 / 3.3, rel=0.02)


@settings(deadline=None, max_examples=50)
@given(
    st.text(max_size=3000), st.floats(0.5, 20), st.integers(1, 100), st.integers(0, 900)
)
def test_blocks_cover_the_tokens_of_any_text(tmp_path_factory, text, chars, size, head):
    """The reader refuses those that do not; and equal beginnings stay equal."""
    tmp_path = tmp_path_factory.mktemp("log")
    rows = [line(0, {"prompt": "x" * 20 + t}) for t in (text, text[:head])]
    options = {"chars_per_token": chars, "block_tokens": size}
    try:
        whole, part = read(tmp_path, *rows, **options)
    except TraceError as error:
        assert "the prompt is empty" in str(error)
        return
    assert whole.hashes[: len(part.hashes)] == part.hashes


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A token for each word."""
    words = (SYSTEM + json.dumps([ASK, ANSWER, MORE])).split()
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *set(words)])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "model"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_counts_where_one_is_given(tmp_path, tokenizer):
    rows = [line(0, {"prompt": SYSTEM}), {**BARE, "answer": "five words long it is"}]
    for where in (tokenizer, tokenizer / "tokenizer.json"):
        text, answered = read(tmp_path, *rows, tokenizer=where)
        assert text.input_tokens == len(SYSTEM.split()) == 100
        assert len(text.hashes) == 100 // 16
        assert answered.output_tokens == 5
        turns = [line(at, body) for at, body in enumerate(TWO_TURNS["chat"])]
        first, second = read(tmp_path, *turns, tokenizer=where)
        assert second.hashes[: len(first.hashes)] == first.hashes


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path, capsys):
    log = put(tmp_path / "log", line(0, chat(ASK)))
    gone = ("--tokenizer", tmp_path / "gone")
    fails(capsys, "gone: no tokenizer.json", "stats", log, *gone)
    own = put(tmp_path / "t", {"schema": "kvtax.trace/1"})
    fails(capsys, "leave --tokenizer out", "stats", own, *gone)


NEITHER = "prompt is neither one text nor one list of token ids"
REFUSED = {
    "no time": ({"messages": [ASK]}, "no time of arrival"),
    "a delay": ({"messages": [ASK], "delay": 5}, "a Mooncake trace with texts"),
    "only a gap": (
        {"session_id": "s", "input": [ASK], "output_length": 5, "pre_gap": 0.1},
        "no time of arrival",
    ),
    "a time that is none": (line("noon", chat(ASK)), "timestamp is no time"),
    "a negative time": (line(-1, chat(ASK)), "timestamp is no time"),
    "no body": ({"timestamp": 1, "body": {"model": "m"}}, "no body with messages"),
    "an empty prompt": (line(0, {"prompt": ""}), "the prompt is empty"),
    "no message": (line(0, {"messages": []}), "messages is no list of messages"),
    "several prompts": (
        line(0, {"prompt": ["a", "b"]}),
        NEITHER,
    ),
    "half an id": (line(0, {"prompt": [1.5]}), NEITHER),
    "no answer": (BARE, "neither usage nor an answer"),
    "a time before 1970": (
        line("1969-12-31T23:59:59Z", chat(ASK)),
        "timestamp is no time",
    ),
    "a time of many digits": (line(10**400, chat(ASK)), "timestamp is no time"),
    "an abyss": (
        line(0, {"messages": [{"content": json.loads("[" * 700 + "]" * 700)}]}),
        "the body is nested too deeply",
    ),
    "an abyss in a string": (line(0, "[" * 10**5), "no body with messages"),
    "too long an answer": (
        line(0, chat(ASK), usage={"completion_tokens": 2**31}),
        "completion_tokens is no number of tokens",
    ),
    "no number": (
        line(0, chat(ASK), usage={"completion_tokens": "7"}),
        "completion_tokens is no number of tokens",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_line_that_is_no_request_is_refused_with_its_place(tmp_path, what):
    row, says = REFUSED[what]
    with pytest.raises(TraceError) as refusal:
        read(tmp_path, line(0, chat(ASK)), row, format="log")
    assert f"log.jsonl, line 2: {says}" in str(refusal.value)
    assert "mend or remove the line" in str(refusal.value)
    # Logs hold secrets; what goes to a terminal does not.
    assert "build" not in str(refusal.value)


FAILED = {
    "a status": {"status": 500},
    "a status as text": {"status_code": "429"},
    "a word": {"status": "failure", "response": "{}"},
    "a status with its text": {"status": "500 Internal Server Error", "output": "x"},
    "a timeout": {"status": "Timeout", "output": "x"},
    "no success": {"success": False, "output": "x"},
    "an error in the answer": {"response": {"error": {"message": "overloaded"}}},
    "an error as text": {"error": "overloaded", "response": "none"},
    "an error in a packed answer": {"response_body": '{"error": {"message": "no"}}'},
}


@pytest.mark.parametrize("how", FAILED)
def test_the_text_of_an_error_is_no_answer(tmp_path, how):
    rows = line(0, chat(ASK)), BARE | FAILED[how]
    with pytest.raises(TraceError, match=r"line 2: the request failed: .*--skip-unus"):
        read(tmp_path, *rows)
    left_out: Counter[str] = Counter()
    assert len(read(tmp_path, *rows, left_out=left_out)) == 1
    assert left_out == {"the request failed": 1}


MIXED = [
    {"timestamp": 0, "body": {"input": ""}, "usage": {"prompt_tokens": 3}},
    line(1, chat(ASK)),
    "",
    "{torn",
    BARE | {"status": 503},
    line(2, chat(MORE)),
    BARE | {"status": 429},
]


def test_unusable_lines_are_left_out_on_request_and_counted(tmp_path, capsys):
    log, out = put(tmp_path / "log", *MIXED), tmp_path / "out"
    fails(capsys, "line 1: ", "stats", log)
    for command in (("stats", "--json", log), ("anonymise", log, out)):
        assert run(*command, "--skip-unusable") == 0
        said = capsys.readouterr().err
        assert "5 lines left out" in said
        assert "2: the request failed" in said
    assert len(list(read_trace(out))) == 2
    counted = json.loads(written(out).partition("\n")[0])["source"]["left_out"]
    assert sum(counted.values()) == 5


def test_a_log_without_a_usable_line_and_another_format_are_refused(tmp_path, capsys):
    log = put(tmp_path / "log", MIXED[0], MIXED[4])
    fails(capsys, "no line is a usable request", "stats", log, "--skip-unusable")
    own = ("--format", "own", "--skip-unusable")
    fails(capsys, "leave --skip-unusable out", "stats", log, *own)
    row = {"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [1]}
    other = put(tmp_path / "t", row)
    fails(capsys, "leave --skip-unusable out", "stats", other, "--skip-unusable")


WORDS = ["confidential", "zebra", "umbrella", "quixotic", "falcon", "marmalade"]
# Whatever is a secret in a log; each is looked for whole and in parts.
SECRETS = {
    "prompt": "the zebra deploys",
    "system": "confidential instructions for falcons",
    "tool": "delete_marmalade",
    "answer": "the umbrella has opened",
    "session": "session-of-quixotic-user-77",
    "user": "alice@example.org",
    "model": "secret-model-9000",
    "key": "Bearer sk-1234567890abcdef",
    "id": "req-abcdef-0001",
}
PART = 8


def secret_log(path: Path, seed: int = 0) -> Path:
    """Twenty conversations of one to four turns; secrets are in every field."""
    draw = random.Random(seed)
    rows = []
    for number in range(20):
        messages = [{"role": "system", "content": SECRETS["system"] * 30}]
        name = f"{SECRETS['session']}-{number}"
        for turn in range(draw.randint(1, 4)):
            said = " ".join(draw.choices(WORDS, k=200)) + SECRETS["prompt"]
            messages = [*messages, {"role": "user", "content": said}]
            tool = {"name": SECRETS["tool"], "description": SECRETS["prompt"]}
            body = {"model": SECRETS["model"], "messages": messages, "tools": [tool]}
            answer = {"role": "assistant", "content": SECRETS["answer"]}
            rows.append(
                {
                    "id": SECRETS["id"],
                    "timestamp": 1767225600.25 + 60 * number + 7 * turn,
                    "session_id": name,
                    "user": SECRETS["user"],
                    "headers": {"authorization": SECRETS["key"]},
                    "body": body | {"user": SECRETS["user"]},
                    "response": {"choices": [{"message": answer}]},
                    "usage": {"prompt_tokens": 600, "completion_tokens": 5},
                }
            )
            messages.append(answer)
    return put(path, *rows)


def parts(secret: str) -> set[str]:
    return {secret[at : at + PART] for at in range(len(secret) - PART + 1)}


def written(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_nothing_that_anybody_wrote_is_in_the_output(tmp_path, capsys, name):
    log, out = secret_log(tmp_path / "alices.jsonl"), tmp_path / name
    assert run("anonymise", log, out) == 0
    said = capsys.readouterr()
    texts = written(out), said.out + said.err
    there = written(log)
    for secret in [*SECRETS.values(), *WORDS]:
        for part in parts(secret):
            assert part in there
            assert not any(part in text for text in texts), part
    # Not when it was, nor in which file. Hashes are random: any digits may be in them.
    assert "1767225" not in re.sub(r'"hashes":\[[^]]*\]', "", texts[0])
    assert "alices" not in texts[0]


def test_the_output_is_a_trace_of_the_same_shape(tmp_path, capsys):
    log, out = secret_log(tmp_path / "log"), tmp_path / "out"
    assert run("anonymise", log, out, "--block-tokens", 32) == 0
    capsys.readouterr()
    before = stats(capsys, log, "--block-tokens", 32)
    after = stats(capsys, out)
    assert before | {"source": "out"} == after
    assert after["sessions"] == 20
    assert after["intra_session_reuse"] > 0.3
    header = json.loads(written(out).partition("\n")[0])
    assert header == {
        "schema": "kvtax.trace/1",
        "requests": after["requests"],
        "source": {"made_by": "kvtax trace anonymise", "chars_per_token": 4.0},
    }


@pytest.mark.slow
def test_hashes_of_equal_texts_differ_from_run_to_run(tmp_path):
    """So nobody can look for a text by hashing it: the key is gone with the process."""
    log = secret_log(tmp_path / "log")
    seen: list[set[int]] = []
    for out in (tmp_path / "a", tmp_path / "b"):
        command = [sys.executable, "-m", "kvtax", "trace", "anonymise", log, out]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
        seen.append({name for one in read_trace(out) for name in one.hashes})
    assert len(seen[0]) == len(seen[1]) > 100
    assert not seen[0] & seen[1]


def test_it_says_how_well_the_estimate_of_tokens_fits(tmp_path, capsys):
    prompt = {"prompt": "x" * 4000}
    usage = {"prompt_tokens": 1250, "completion_tokens": 5}
    log = put(tmp_path / "log", {"timestamp": 0, "body": prompt, "usage": usage})
    assert run("anonymise", log, tmp_path / "a") == 0
    said = capsys.readouterr().out
    assert "1,250 tokens" in said and "1,000 estimated" in said
    assert "--chars-per-token 3.20 would make them equal" in said
    assert run("anonymise", log, tmp_path / "b", "--chars-per-token", 3.2) == 0
    assert next(iter(read_trace(tmp_path / "b"))).input_tokens == 1254


def test_a_bad_line_leaves_nothing_and_says_nothing_of_the_text(tmp_path, capsys):
    log = secret_log(tmp_path / "log")
    torn = put(tmp_path / "torn", written(log)[:-400], end="")
    fails(capsys, "the file ends within the line", "anonymise", torn, tmp_path / "o")
    fails(capsys, "No such file", "anonymise", tmp_path / "gone", tmp_path / "o")
    assert sorted(tmp_path.iterdir()) == [log, torn]


def test_a_trace_that_is_no_log_is_not_taken_for_one(tmp_path, capsys):
    row = {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1]}
    trace = put(tmp_path / "t", row)
    fails(capsys, "line 1: no body with messages", "anonymise", trace, tmp_path / "o")
