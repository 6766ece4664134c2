# SPDX-License-Identifier: Apache-2.0
"""Records of every recorder that wrote today's schema give the same answer.

A recorder is named by the commit that changed what the header holds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtax.look.demo import unpack
from kvtax.look.instance_summary import Cost, cost
from tests.look.conftest import main, only

FIRST = {"schema", "clock", "units", "vllm_version", "pid", "label"}
METHODS = FIRST | {"methods", "rank"}
MOMENTS = METHODS | {"began_ns", "began_unix_ns", "boot_id", "every"}
LIVES = MOMENTS | {"life", "host", "dp_rank", "cpu_every", "not_timed"}
RECORDERS = {
    "286c7f3f": FIRST,
    "4e899bf2": METHODS,
    "6609bfa1": MOMENTS,
    "af8ff092": LIVES,
    "4f54bcd5": LIVES | {"connectors"},
    "d15bd6ae": LIVES | {"connectors", "stage"},
}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shipped")
    unpack(folder)
    return folder / "hash_walk"


@pytest.fixture(scope="module")
def now(shipped: Path) -> Cost:
    return cost(only(shipped))


@pytest.mark.parametrize(
    "commit",
    [
        "286c7f3f",
        *(pytest.param(each, marks=pytest.mark.slow) for each in list(RECORDERS)[1:]),
    ],
)
def test_the_cost_is_the_same(shipped, now, tmp_path, commit, capsys):
    for path in shipped.glob("*.jsonl"):
        header, *lines = path.read_text().splitlines()
        kept = json.loads(header)
        kept = {key: kept[key] for key in kept if key in RECORDERS[commit]}
        text = [json.dumps(kept), *lines, ""]
        (tmp_path / path.name).write_text("\n".join(text))
    then = cost(only(tmp_path))
    assert then.connector.share == pytest.approx(now.connector.share)
    means = {part.name: part.mean_us for part in then.methods if part.mean_us}
    assert means == pytest.approx(
        {part.name: part.mean_us for part in now.methods if part.mean_us}
    )
    assert main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "unknown" not in capsys.readouterr().out.splitlines()[0]


def test_records_without_calls_by_method_have_those_of_single_fields(shipped, tmp_path):
    """As the first recorder wrote them."""
    for path in shipped.glob("*step*.jsonl"):
        header, *lines = map(json.loads, path.read_text().splitlines())
        kept = [{key: header[key] for key in header if key in FIRST}]
        for line in lines:
            fields = {k: v for k, v in line.items() if not k.startswith("connector_")}
            kept.append(fields)
        text = "".join(json.dumps(line) + "\n" for line in kept)
        (tmp_path / path.name).write_text(text)
    means = {part.name: part.mean_us for part in cost(only(tmp_path)).methods}
    assert means["scheduler.build_connector_meta"] == pytest.approx(594.2, abs=0.1)
    assert means["worker.get_finished"] == pytest.approx(238.0, abs=0.1)
