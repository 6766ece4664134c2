# SPDX-License-Identifier: Apache-2.0
"""A trial counts only if its server began fresh and its peer read."""

from __future__ import annotations

import json
from itertools import islice, takewhile
from pathlib import Path

import pytest

from connectors.direct_read.peer import Read, reads
from kvtax.engine.connector import load_connector
from kvtax.proc.ports import reserve
from kvtax.records.files import LineFile
from kvtax.records.run import ReadCounts
from kvtax.records.steps import EngineHeader, EngineStep
from microbench.profile import load_profile
from microbench.trial import TrialError, _check_fresh, _count_reads, _peer

PROFILE = load_profile("cpu-smoke")
OWN_BLOCKS = 3


def write_first_step(folder: Path, **changes: int | None) -> None:
    fields = {
        "step_id": 0,
        "prefill_tokens": OWN_BLOCKS * PROFILE.block_size + 1,
        "cache_size": OWN_BLOCKS,
    }
    with LineFile(folder / "engine_step.jsonl", EngineHeader(pid=1)) as file:
        file.append(EngineStep(t_ns=1, **fields | changes))


def test_a_server_that_caches_its_own_first_prompt_is_fresh(tmp_path: Path) -> None:
    write_first_step(tmp_path)
    _check_fresh(tmp_path, PROFILE)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cache_size": OWN_BLOCKS + 1}, "found 1 cached blocks that it did not bring"),
        ({"step_id": 1}, "was not fresh: its first step .id 1."),
        ({"cache_size": None}, "step_timing_v2"),
    ],
)
def test_any_other_server_is_refused(
    tmp_path: Path, changes: dict[str, int | None], why: str
) -> None:
    write_first_step(tmp_path, **changes)
    with pytest.raises(TrialError, match=why):
        _check_fresh(tmp_path, PROFILE)


def test_an_engine_without_a_step_is_refused(tmp_path: Path) -> None:
    LineFile(tmp_path / "engine_step.jsonl", EngineHeader(pid=1)).__exit__()
    with pytest.raises(TrialError, match="did not record"):
        _check_fresh(tmp_path, PROFILE)


SERVING = load_connector("direct_read_serving")
# Three prompts of two blocks before a reset of the cache, two after it.
PASSES = [
    [[bytes([number, block]) for block in range(2)] for number in numbers]
    for numbers in (range(3), range(3, 5))
]


class Instance:
    """Has some of the prompts' blocks; notes which prompts were asked for."""

    def __init__(self) -> None:
        self.has: set[bytes] = set()
        self.asked: list[int] = []

    def read(self, hashes: list[bytes]) -> Read:
        self.asked.append(hashes[0][0])
        offered = len(list(takewhile(self.has.__contains__, hashes)))
        return Read(len(self.asked), offered, offered, 1.0)


def test_the_peer_reads_the_oldest_whole_prompt_since_the_last_reset():
    instance = Instance()
    turns = reads(instance, PASSES, per_s=1e6)
    assert next(turns).offered == 0
    instance.has = {block for prompt in PASSES[0] for block in prompt}
    assert [read.offered for read in islice(turns, 3)] == [2, 2, 2]
    assert instance.asked[-3:] == [0, 0, 0]
    # The end of a prompt is evicted first.
    instance.has -= {PASSES[0][0][1]}
    assert next(turns).offered == 2 and instance.asked[-1] == 1
    instance.has = set(PASSES[1][0])
    assert next(turns).offered == 2 and instance.asked[-1] == 3
    instance.has |= set(PASSES[1][1])
    assert next(turns).offered == 2 and instance.asked[-1] == 3


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
