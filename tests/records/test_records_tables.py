# SPDX-License-Identifier: Apache-2.0
"""docs/records.md says of every field of every file what the structs say of it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import msgspec
import pytest
from kvtax_fleet import analyze
from kvtax_fleet.records.decisions import DecisionRecord

from kvtax import records
from kvtax.paths import REPOSITORY
from kvtax.records.requests import DriverEnd
from kvtax.records.tables import descriptions, table, with_tables

PAGE = REPOSITORY / "docs" / "records.md"
# What two files have in common stands in the tables of both.
COMMON = {
    *("requests.Outcome", "requests.Account", "arm.PlannedArm", "steps.FileHeader"),
}


def structs(room: ModuleType) -> dict[str, type[msgspec.Struct]]:
    """Every struct of a room, by the full name of its module and its own."""
    kinds = {}
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            is_struct = inspect.isclass(kind) and issubclass(kind, msgspec.Struct)
            imported = is_struct and kind.__module__ != module.name
            if is_struct and not imported and not name.startswith("_"):
                kinds[f"{module.name}.{name}".removeprefix("kvtax.records.")] = kind
    return kinds


# The files of runs, and analysis.json, whose structs stand beside their computation.
STRUCTS = structs(records) | structs(analyze)


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_every_field_of_a_record_has_a_description(name: str) -> None:
    told = descriptions(STRUCTS[name])
    assert [field for field in STRUCTS[name].__struct_fields__ if field in told] == [
        *STRUCTS[name].__struct_fields__
    ]


@pytest.mark.parametrize("name", sorted(STRUCTS.keys() - COMMON))
def test_every_record_has_a_table(name: str) -> None:
    mark = f"<!-- fields of {name} -->"
    told = (
        f"{PAGE}: add {mark} and <!-- end -->, then run python -m kvtax.records.tables"
    )
    assert mark in PAGE.read_text(), told


def test_the_tables_are_those_of_the_structs() -> None:
    page = PAGE.read_text()
    made = with_tables(page)
    assert made == page, "run `python -m kvtax.records.tables docs/records.md`"


def test_a_file_that_has_a_schema_has_it_in_a_heading() -> None:
    page = PAGE.read_text()
    for name, kind in STRUCTS.items():
        if kind.__struct_config__.tag_field == "schema":
            assert f", schema `{kind.__struct_config__.tag}`\n" in page, name


class Undocumented(msgspec.Struct):
    """One field is described, the other is not."""

    told: int
    """What it is."""
    untold: int


def test_a_field_without_a_description_makes_no_table() -> None:
    with pytest.raises(KeyError, match="untold"):
        table(Undocumented)


def test_a_table_has_inherited_fields_and_the_names_of_the_file() -> None:
    rows = table(DriverEnd).splitlines()
    assert rows[2] == "| `scheduled` | Requests that were to be sent. |"
    assert rows[-1].startswith("| `driver_cpu_s` | ")
    assert "| `class` | `WARM`, `MEDIUM`, `HEAVY` or `HUGE`" in table(DecisionRecord)


def test_a_page_that_is_out_of_date_is_made_anew() -> None:
    old = "a\n<!-- fields of run.PlanEntry -->\n| stale |\n<!-- end -->\nb\n"
    made = with_tables(old)
    assert "stale" not in made and "| `config` |" in made
    assert made.startswith("a\n<!-- fields") and made.endswith("<!-- end -->\nb\n")
