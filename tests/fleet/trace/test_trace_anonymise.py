# SPDX-License-Identifier: Apache-2.0
"""`fleet.trace anonymise`: a log's shape comes out, and nothing that anybody wrote."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from trace_commands import fails, run, stats
from trace_rows import put

from fleet.trace import read_trace
from lab.paths import REPOSITORY

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
    # Not when it was, nor in which file.
    assert "1767225" not in texts[0]
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
        "source": {"made_by": "fleet.trace anonymise", "chars_per_token": 4.0},
    }


def test_hashes_of_equal_texts_differ_from_run_to_run(tmp_path):
    """So nobody can look for a text by hashing it: the key is gone with the process."""
    log = secret_log(tmp_path / "log")
    seen: list[set[int]] = []
    for out in (tmp_path / "a", tmp_path / "b"):
        command = [sys.executable, "-m", "fleet.trace", "anonymise", log, out]
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
    assert "1,250 tokens by the log's own usage, 1,000 here" in said
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
