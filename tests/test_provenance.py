# SPDX-License-Identifier: Apache-2.0
"""Each committed result names a commit of this history, a clean tree, its command.

Results that git does not keep come back to the byte.
"""

from __future__ import annotations

import functools
import gzip
import json
import lzma
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS
from kvtax.cli import subcommands
from kvtax.paths import REPOSITORY
from tools.locked_results import (
    ResultsError,
    check,
    config_of,
    fingerprint,
    inputs_of,
    promise,
    read_lock,
    write_lock,
)

# Data that no command here measured: inputs, and vectors of tests.
INPUTS = (
    "configs/models/",
    "fleet/traces/",
    "kvtax/look/grafana.json",
    "kvtax/report/assets/",
    "tests/patcher/",
)
# Results whose file names no command: what makes them.
MADE_BY = {
    "kvindex/results.json": "make kvindex-bench",
    "kvindex/locks.json": "make kvindex-locks",
}
# What breaks the rule and stays, as users need it, until it is measured again.
BEFORE = ("0.18", "0.22", "0.25", "0.28", "0.30", "0.32")
KEPT = {
    f"studies/observatory/{release}": "from trees that its own results made dirty, by "
    "`python -m observatory`, which is `kvtax axes` now"
    for release in BEFORE
} | {
    "studies/gpu/per_config.json": "from 5dcffe9 with a profile added, on a machine "
    "that is given back",
    "fleet/configs/hosts/": "the host of all experiments in virtual time; made of the "
    "observatory's cells, its file has no room for a provenance",
}
COMMIT = re.compile(r"[0-9a-f]{40}")
CLEAN = (False, None)


def results() -> list[str]:
    """List the committed data files, but for INPUTS."""
    listed = _git("ls-files", "*.json", "*.json.gz", "*.jsonl.xz", "*.jsonl.gz").split()
    return [name for name in listed if not name.startswith(INPUTS)]


def documents(name: str) -> Iterator[dict[str, Any]]:
    """Yield the documents of a file."""
    content = (REPOSITORY / name).read_bytes()
    if name.endswith(".xz"):
        content = lzma.decompress(content)
    elif name.endswith(".gz"):
        content = gzip.decompress(content)
    lines = content.splitlines() if ".jsonl" in name else [content]
    yield from map(json.loads, lines)


def provenances(document: Any) -> Iterator[dict[str, Any]]:
    """Yield each mapping in a document that names a commit."""
    if isinstance(document, dict):
        if commits_of(document):
            yield document
        document = list(document.values())
    if isinstance(document, list):
        for part in document:
            yield from provenances(part)


def commits_of(facts: dict[str, Any]) -> list[str]:
    """Return the commits that a mapping names directly."""
    named = (facts.get("git_commit"), facts.get("commit"))
    return [value for value in named if isinstance(value, str)]


def breaches(name: str, document: dict[str, Any]) -> list[str]:
    """Say what a result lacks."""
    listed = list(provenances(document))
    if not listed:
        return ["names no commit"]
    lacks = []
    for facts in listed:
        for commit in commits_of(facts):
            if not in_history(commit):
                lacks.append(f"{commit[:7]} is no commit of this history")
        dirty = facts.get("git_dirty", facts.get("dirty"))
        if dirty not in CLEAN:
            lacks.append("made from a tree with changes")
    (first, *_) = listed
    command = MADE_BY.get(name) or first.get("command_line") or first.get("command")
    if not command:
        lacks.append("names no command")
    elif not (exists(command) or is_named(name, command, commits_of(first)[0])):
        lacks.append(f"{command.split(' --')[0]!r} does not exist")
    elif re.search(r"[\s=]/", command):
        lacks.append("names a folder of one machine")
    return lacks


@functools.cache
def in_history(commit: str) -> bool:
    """Return whether HEAD has the commit. Fails the test in a shallow clone."""
    if _git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.fail("the history is missing: git fetch --unshallow")
    if not COMMIT.fullmatch(commit):
        return False
    ancestor = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return not subprocess.run(ancestor, cwd=REPOSITORY, capture_output=True).returncode


def exists(command: str) -> bool:
    """Return whether there is such a command today."""
    program, *words = command.split()
    if program == "make":
        makefile = (REPOSITORY / "Makefile").read_text()
        return re.search(f"^{words[0]}:", makefile, re.MULTILINE) is not None
    if program == "kvtax":
        return words[0] in {command.name for command in subcommands(["fleet"])}
    if words[:2] == ["-m", "benchmarks"]:
        return words[2] in {benchmark.name for benchmark in BENCHMARKS}
    if words[:1] == ["-m"]:
        file = REPOSITORY / words[1].replace(".", "/")
        return file.with_suffix(".py").exists() or (file / "__main__.py").exists()
    return False


def is_named(name: str, command: str, commit: str) -> bool:
    """Return whether a result of an earlier command has a page with its commit."""
    folders = [REPOSITORY / folder for folder in Path(name).parents]
    pages = [folder / "README.md" for folder in folders]
    pages.append(REPOSITORY / "docs" / "benchmarks.md")
    named = any(page.exists() and commit[:7] in page.read_text() for page in pages)
    return named and command.startswith(("kvtax bench ", "python -m studies."))


@functools.cache
def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stderr}: this test needs the clone's history"
    return done.stdout


@pytest.mark.parametrize("name", results())
def test_a_result_names_its_commit_a_clean_tree_and_a_command_that_exists(name):
    lacks = {lack for document in documents(name) for lack in breaches(name, document)}
    if name.startswith(tuple(KEPT)):
        assert lacks, f"{name} holds the rule now: remove it from KEPT"
        assert not [lack for lack in lacks if "history" in lack]
    else:
        assert not lacks


def test_a_locked_result_names_its_commit_and_an_experiment_that_exists():
    lock = tomllib.loads((REPOSITORY / "fleet" / "results.lock").read_text())
    for name, locked in lock.items():
        assert in_history(locked["commit"]), name
        assert config_of(name).is_file(), name
        assert locked["inputs"].keys() == inputs_of(name).keys()


HEAD = _git("rev-parse", "HEAD").strip()


@pytest.mark.parametrize(
    ("facts", "lack"),
    [
        ({}, "names no commit"),
        ({"git_commit": "0" * 40}, "0000000 is no commit of this history"),
        ({"git_commit": HEAD[:7]}, "is no commit of this history"),
        ({"git_commit": HEAD, "git_dirty": True}, "made from a tree with changes"),
        ({"git_commit": HEAD, "command_line": ""}, "names no command"),
        ({"git_commit": HEAD, "command_line": "python -m costs.growth"}, "not exist"),
        ({"git_commit": HEAD, "command_line": "kvtax bench growth"}, "not exist"),
        ({"git_commit": HEAD, "command_line": "kvtax none"}, "not exist"),
        ({"git_commit": HEAD, "command_line": "kvtax sweep --out /x"}, "one machine"),
    ],
)
def test_a_breach_is_named(facts, lack):
    good = {"git_dirty": False, "command_line": "kvtax sweep --out x"}
    name = "benchmarks/results/x.json"
    assert breaches(name, {"provenance": good | {"git_commit": HEAD}}) == []
    (breach,) = breaches(name, {"provenance": good | facts})
    assert lack in breach


def _finished(folder: Path, numbers: dict, **versions: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made = {"versions": {"git_commit": HEAD, "git_dirty": False} | versions}
    (folder / "analysis.json").write_text(json.dumps({"made": made} | numbers))
    return folder


def test_what_was_locked_is_as_promised_and_another_result_is_not(tmp_path):
    name = "rules_chat"
    run = _finished(tmp_path / "run", {"arms": {"linear": 1.0}})
    locked = promise(name, run)
    assert locked.commit == HEAD and locked.inputs == inputs_of(name)
    write_lock({name: locked}, tmp_path / "lock")
    assert read_lock(tmp_path / "lock") == {name: locked}
    check(name, locked, run)
    other = _finished(tmp_path / "other", {"arms": {"linear": 1.5}})
    with pytest.raises(ResultsError, match=name):
        check(name, locked, other)


def test_a_run_of_a_tree_with_changes_is_not_locked(tmp_path):
    run = _finished(tmp_path / "run", {"arms": {}}, git_dirty=True)
    with pytest.raises(ResultsError, match="uncommitted"):
        promise("rules_chat", run)


def test_a_changed_number_changes_the_fingerprint_and_provenance_does_not(tmp_path):
    def analysis(value: float, commit: str):
        path = tmp_path / f"{value}-{commit}.json"
        path.write_text(json.dumps({"made": commit, "arms": {"linear": value}}))
        return fingerprint(path)

    assert analysis(1.0, "a") == analysis(1.0, "b") != analysis(1.5, "a")


def test_a_tree_with_changes_gives_the_same_fingerprint(tmp_path):
    def analysis(*kinds: str) -> str:
        path = tmp_path / "analysis.json"
        warnings = [{"kind": kind} for kind in kinds]
        path.write_text(json.dumps({"arms": {}, "warnings": warnings}))
        return fingerprint(path)

    assert analysis("drain") == analysis("uncommitted", "drain") != analysis()
