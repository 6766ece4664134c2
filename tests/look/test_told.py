# SPDX-License-Identifier: Apache-2.0
"""What is told is computed quickly, and is what the plain definition says."""

from __future__ import annotations

import threading

import numpy as np
import polars as pl
import pytest
from made_up_server import served

from lab.records.warning import RunWarning
from look import instances
from look.cost import cost, quantiles
from look.found import find
from look.instances import one_by_one, read_instances
from look.told import told_of


@pytest.mark.parametrize("count", [1, 2, 3, 50, 99, 100, 101, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_quantiles_are_those_of_the_series(count, seed):
    rng = np.random.default_rng(seed)
    us = pl.Series(rng.exponential(50, count).round(1), dtype=pl.Float32)
    shares = (0.0, 0.5, 0.9, 0.99, 1.0)
    assert quantiles(us, shares) == [us.quantile(share) for share in shares]


def test_a_part_is_told_as_its_steps_were(tmp_path):
    ((instance,), _) = read_instances(served(tmp_path / "records").write())
    told = cost(instance)
    for part in (told.step, *told.parts, *told.methods):
        us = instance.steps[part.column]
        assert part.mean_us == us.mean()
        assert part.most_us == us.max()
        assert (part.p50_us, part.p99_us) == (us.quantile(0.5), us.quantile(0.99))


def test_each_method_and_their_sum_have_slopes(tmp_path):
    ((instance,), _) = read_instances(served(tmp_path / "records", 2_500).write())
    told = told_of(instance)
    assert list(told.moves) == ["connector_us", *instance.methods]
    whole = told.moves["connector_us"]["cache"].value
    parts = [told.moves[name]["cache"].value for name in instance.methods]
    assert sum(parts) == pytest.approx(whole, abs=1e-4)


@pytest.fixture
def three(tmp_path):
    for name in "abc":
        served(tmp_path / name, steps=50).write()
    return tmp_path


def test_one_bad_instance_is_a_warning_in_its_place(three):
    with (three / "b" / "engine_step.jsonl").open("a") as file:
        file.write('{"t_ns": 1}\n')
    found, _ = find(three)
    first, bad, last = one_by_one(found)
    assert (first.name, last.name) == ("a", "c")
    assert isinstance(bad, RunWarning)
    assert "without step_id" in bad.message


def test_the_next_instance_is_read_while_one_is_looked_at_and_no_more(
    three, monkeypatch
):
    read = {name: threading.Event() for name in "abc"}
    read_instance = instances.read_instance

    def noted(found):
        read[found.name].set()
        return read_instance(found)

    monkeypatch.setattr(instances, "read_instance", noted)
    found, _ = find(three)
    reading = one_by_one(found)
    assert next(reading).name == "a"
    assert read["b"].wait(10)
    assert not read["c"].wait(0.2)
    assert [one.name for one in reading] == ["b", "c"]
