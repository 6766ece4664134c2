# SPDX-License-Identifier: Apache-2.0
"""The peer of a trial: what it reads, and that a trial fails without it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from connectors.direct_read.reader import Read
from lab.records.trial import ReadCounts
from lab.serving.connector import load_connector
from lab.serving.ports import reserve
from microbench.direct_read_peer import reads
from microbench.trial import TrialError, _count_reads, _peer

SERVING = load_connector("direct_read_serving")
PROMPTS = [[bytes([number])] for number in range(4)]


class Instance:
    """Has some of the prompts, each of one block; notes which were asked for."""

    def __init__(self) -> None:
        self.has: set[bytes] = set()
        self.asked: list[int] = []

    def read(self, hashes: list[bytes]) -> Read:
        self.asked.append(hashes[0][0])
        found = int(hashes[0] in self.has)
        return Read(len(self.asked), found, found, 1.0)


def test_the_peer_reads_the_newest_prompt_that_is_there():
    instance = Instance()
    turns = reads(instance, PROMPTS, per_s=1e6)
    assert next(turns).offered == 0
    instance.has |= {PROMPTS[0][0], PROMPTS[1][0]}
    # One prompt is sent after the other: each turn it may be one further.
    assert [read.offered for read in islice(turns, 3)] == [1, 1, 1]
    assert instance.asked[-1] == 1
    # The prefix cache was reset, and the prompt after that is there.
    instance.has = {PROMPTS[2][0]}
    assert next(turns).offered == 1 and instance.asked[-1] == 2
    instance.has = {PROMPTS[3][0]}
    assert [read.offered for read in islice(turns, 2)] == [1, 1]
    assert instance.asked[-2:] == [3, 3]


def write_reads(folder: Path, valid: int, torn: bool = False) -> None:
    lines = [{"schema": "kvtax.reads/1"}]
    lines += [{"t_ns": 10**9 * n, "offered": 4, "valid": valid} for n in range(3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "reads.jsonl").write_text(text + ('{"t_ns":5,"of' if torn else ""))
    (folder / "peer.log").write_text("a reason\n")


def test_a_trial_whose_peer_read_nothing_fails(tmp_path: Path):
    write_reads(tmp_path, valid=0)
    with pytest.raises(TrialError, match=r"(?s)no valid block in 3 turns.*a reason"):
        _count_reads(tmp_path)


def test_what_the_peer_read_is_counted_up_to_a_torn_line(tmp_path: Path):
    write_reads(tmp_path, valid=3, torn=True)
    counts = ReadCounts(reads=3, blocks_offered=12, blocks_valid=9, seconds=2.0)
    assert _count_reads(tmp_path) == counts


@pytest.mark.slow
def test_a_trial_whose_peer_cannot_start_fails_with_its_last_words(tmp_path: Path):
    with (
        pytest.raises(TrialError, match=r"(?s)did not start.*plan\.json"),
        _peer(tmp_path, SERVING, 16, reserve(1)[0]),
    ):
        pytest.fail("it has no plan")
