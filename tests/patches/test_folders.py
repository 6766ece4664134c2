# SPDX-License-Identifier: Apache-2.0
"""Every patch and every file in patches/ is used and documented."""

from __future__ import annotations

import re
import tomllib

import pytest

import blockpatch
from lab.paths import CONFIGS, PATCHES

LOADED = blockpatch.load_patches(PATCHES)


def measured() -> set[str]:
    """The patches of all configs, profiles and sets."""
    files = [
        *(CONFIGS / "connectors").rglob("*.toml"),
        *(CONFIGS / "profiles").glob("*.toml"),
    ]
    tables = [tomllib.loads(path.read_text()) for path in files]
    names = {name for table in tables for name in table.get("patches", [])}
    return names.union(*blockpatch.load_sets(PATCHES).values())


@pytest.mark.parametrize("name", LOADED)
def test_a_patch_is_part_of_a_config_or_its_readme_says_how_to_apply_it(name):
    readme = (PATCHES / name / "README.md").read_text()
    assert name in measured() or f"--apply --patch {name}" in readme


def test_configs_and_sets_name_only_patches_that_are_there():
    assert measured() <= LOADED.keys()


def test_the_table_of_patches_lists_each_of_them_with_its_releases():
    text = (PATCHES / "README.md").read_text()
    rows = re.findall(r"^\| \[`(\w+)`\]\(\1/\) \| (\w+) \| ([\d., ]+) \|", text, re.M)
    assert rows == [
        (name, LOADED[name].package, ", ".join(LOADED[name].tested))
        for name, *_ in rows
    ]
    assert sorted(name for name, *_ in rows) == sorted(LOADED)


def test_every_file_beside_a_manifest_is_added_by_some_patch():
    sources = set()
    for name in LOADED:
        manifest = tomllib.loads((PATCHES / name / "patch.toml").read_text())
        for file in manifest.get("file", []):
            sources.add((PATCHES / name / file["source"]).resolve())
    found = {path for name in LOADED for path in (PATCHES / name).rglob("*.py")}
    assert found == sources
    others = {path.name for name in LOADED for path in (PATCHES / name).iterdir()}
    assert others - {path.name for path in sources} - {"__pycache__"} == {
        "patch.toml",
        "README.md",
    }
