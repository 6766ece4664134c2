# SPDX-License-Identifier: Apache-2.0
"""`kvtax fields` describes every field of every file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import msgspec
import pytest
from kvtax_fleet.records.decisions import DecisionRecord

from kvtax import records
from kvtax.cli import Exit, main
from kvtax.cli.fields import formats
from kvtax.records.formats import described, table
from kvtax.records.requests import DriverEnd

FORMATS = {form.name: form for form in formats()}


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_of_a_file_is_described(name, capsys):
    """A struct without a description raises."""
    assert main(["fields", name.replace("*", "x")]) == Exit.GOOD
    assert capsys.readouterr().out == described(FORMATS[name])


def test_every_document_of_the_core_has_a_format():
    tagged = set()
    for module in pkgutil.iter_modules(records.__path__, "kvtax.records."):
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
                config = kind.__struct_config__
                tagged |= {config.tag} if config.tag_field == "schema" else set()
    first = {form.kinds[0].__struct_config__.tag for form in FORMATS.values()}
    assert tagged <= first


def test_structs_inside_of_others_are_described():
    page = described(FORMATS["run.json"])
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert {"## RunRecord", "## AimOfConfig"} <= set(headings)


def test_a_file_is_found_by_its_path_packed_or_not(capsys):
    for path in ("run/plain/r0/worker_step.r3.jsonl", "hosts/mine.json", "run.json.gz"):
        assert main(["fields", path]) == Exit.GOOD
        assert capsys.readouterr().out.startswith("# ")


def test_an_unknown_file_is_bad_input_and_the_known_ones_are_listed(capsys):
    assert main(["fields", "steps.csv"]) == Exit.BAD_INPUT
    error = capsys.readouterr().err
    assert "steps.csv" in error and "engine_step.jsonl" in error


class Undocumented(msgspec.Struct):
    """One field is described, the other is not."""

    known: int
    """A description."""
    unknown: int


def test_a_field_without_a_description_makes_no_table():
    with pytest.raises(KeyError, match="unknown"):
        table(Undocumented)


def test_a_table_has_inherited_fields_and_the_names_of_the_file():
    rows = table(DriverEnd).splitlines()
    assert rows[2] == "| `scheduled` | Requests that were to be sent. |"
    assert rows[-1].startswith("| `driver_cpu_s` | ")
    assert "| `class` | `WARM`, `MEDIUM`, `HEAVY` or `HUGE`" in table(DecisionRecord)
