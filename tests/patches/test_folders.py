# SPDX-License-Identifier: Apache-2.0
"""Every patch and every file in patches/ is used and documented."""

from __future__ import annotations

import re
import subprocess
import tomllib

from kvtax import patcher
from kvtax.paths import CONFIGS, PATCHES, REPOSITORY

LOADED = patcher.load_patches(PATCHES)
RELEASES = patcher.load_releases(CONFIGS / "releases.toml")
# Documents that a command writes.
GENERATED = ("studies/observatory/",)


def measured() -> set[str]:
    """The patches of all configs, profiles and sets."""
    files = [
        *(CONFIGS / "connectors").rglob("*.toml"),
        *(CONFIGS / "profiles").glob("*.toml"),
    ]
    tables = [tomllib.loads(path.read_text()) for path in files]
    # A family's file has a table for each config.
    tables += [t for file in tables for t in file.values() if isinstance(t, dict)]
    # A file holds one config, or a family of them by name.
    tables += [value for table in tables for value in table.values()]
    named = [table.get("patches", []) for table in tables if isinstance(table, dict)]
    names = {name for patches in named for name in patches}
    return names.union(*patcher.load_sets(PATCHES).values())


def test_configs_and_sets_name_only_patches_that_are_there():
    assert measured() <= LOADED.keys()


def test_the_page_of_patches_names_each_in_its_list_and_has_a_section_for_it():
    text = (PATCHES / "README.md").read_text()
    listed, _, sections = text.partition("\n## ")
    assert sorted(re.findall(r"^### (\w+)$", sections, re.M)) == sorted(LOADED)
    assert set(re.findall(r"`(\w+)`", listed)) >= LOADED.keys()


def test_each_release_that_has_a_cpu_build_has_its_lock_and_each_lock_its_release():
    releases = [release for list_ in RELEASES.values() for release in list_]
    locks = {release.lock for release in releases if release.lock}
    assert {lock for lock in locks if not (REPOSITORY / lock).is_file()} == set()
    of_releases = (REPOSITORY / "locks" / "releases").glob("*.txt")
    unlisted = {str(path.relative_to(REPOSITORY)) for path in of_releases} - locks
    assert unlisted == set(), "add them to configs/releases.toml"
    misnamed = [
        release
        for release in releases
        if (lock := release.lock or "").startswith("locks/releases/")
        and lock != f"locks/releases/{release.version}.txt"
    ]
    assert misnamed == []


def test_no_file_repeats_the_list_of_releases():
    """Five of its versions in one line are a list: read configs/releases.toml."""
    version = "|".join(re.escape(release.version) for release in RELEASES["vllm"])
    a_list = re.compile(rf"(?:(?<![\d.])(?:{version})(?![\d.]).*?){{5}}")
    files = subprocess.run(
        ["git", "ls-files", "-z", "*.md", "*.toml", "*.py", "*.sh", "Makefile"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    repeated = [
        f"{path}:{number}"
        for path in filter(None, files)
        if not path.startswith(GENERATED) and (REPOSITORY / path).is_file()
        for number, line in enumerate((REPOSITORY / path).read_text().splitlines(), 1)
        if a_list.search(line)
    ]
    assert repeated == []


def test_every_file_beside_a_manifest_is_added_by_some_patch():
    sources = set()
    for name in LOADED:
        manifest = tomllib.loads((PATCHES / name / "patch.toml").read_text())
        for file in manifest.get("file", []):
            sources.add((PATCHES / name / file["source"]).resolve())
    # The recorder is a package of its own, all of which goes in.
    recorder = REPOSITORY / "probe" / "kvtax_probe"
    paths = {path for name in LOADED for path in (PATCHES / name).rglob("*.py")}
    paths |= set(recorder.glob("*.py"))
    assert paths == sources
    others = {path.name for name in LOADED for path in (PATCHES / name).iterdir()}
    others -= {path.name for path in sources} | {"__pycache__"}
    assert others == {"patch.toml"}
