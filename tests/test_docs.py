# SPDX-License-Identifier: Apache-2.0
"""What the documents name is there: files, headings, make targets, modules."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtax.cli import main, subcommands
from kvtax.engine.connector import load_connector
from kvtax.paths import REPOSITORY
from tools import figures

FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=REPOSITORY,
    check=True,
    text=True,
    capture_output=True,
).stdout.splitlines()
ROOMS = sorted(
    {name.partition("/")[0] for name in FILES if "/" in name and name[0] != "."}
)
# The series for upstream names files of vLLM.
NAMES_VLLMS_FILES = REPOSITORY / "patches" / "upstream" / "README.md"
# A value of a record, not a file.
VALUES = ("kvtax/N",)
# Rooms whose READMEs list their files by bare name.
LISTED = ("benchmarks", "kvtax", "microbench", "studies", "tools")


def documents() -> list[Path]:
    pages = {REPOSITORY / name for name in FILES if name.endswith(".md")}
    return sorted(page for page in pages if page.exists())


def headings(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def dead_links(page: Path) -> list[str]:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in headings(file.read_text())):
            dead.append(target)
    return dead


def missing_files(page: Path) -> list[str]:
    """Paths from the root, in backticks or commands; in a room, bare modules too."""
    text = page.read_text()
    path = rf"(?<![\w./<{{-])(?:{'|'.join(ROOMS)})/[\w./*-]*\w/?(?![\w<{{])"
    quoted = re.findall(r"`([^`\n]+)`|^ {4}(.+)$", text, flags=re.MULTILINE)
    named = [name for pair in quoted for name in re.findall(path, "".join(pair))]
    missing = [
        name for name in named if name not in VALUES if not any(REPOSITORY.glob(name))
    ]
    if any(page.is_relative_to(REPOSITORY / room) for room in LISTED):
        there = {file.name for file in page.parent.rglob("*.py")}
        missing += sorted(set(re.findall(r"`(\w+\.py)`", text)) - there)
    return missing


def missing_commands(page: Path) -> list[str]:
    text = page.read_text()
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    made = re.findall(r"(?:^ {4}|`)make ([a-z][a-z-]*)", text, flags=re.MULTILINE)
    missing = [f"make {target}" for target in made if target not in targets]
    for module in re.findall(rf"python -m ((?:{'|'.join(ROOMS)})\b[\w.]*\b)", text):
        file = REPOSITORY / module.replace(".", "/")
        if module.endswith(".NAME"):
            continue
        if not (file.with_suffix(".py").exists() or (file / "__main__.py").exists()):
            missing.append(f"python -m {module}")
    # Of an earlier commit, which the page names.
    known = {command.name for command in subcommands(["fleet"])} | {"bench"}
    used = re.findall(r"(?:^ {4}|`|bin/|uvx )kvtax ([a-z]+)", text, flags=re.MULTILINE)
    missing += [f"kvtax {name}" for name in used if name not in known]
    return missing


COMMAND = re.compile(
    r"kvtax ((?:fleet|trace) (?:launch|replay|analyze|decide|roofline|stats|sample)"
    r"|look|run|patch|gate|compare|sweep|axes|demo|proxy)\b([^`\n|#]*)"
)


@functools.cache
def options_of(command: str) -> set[str]:
    """Read a command's options off its help."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return set(re.findall(r"--[a-z][a-z0-9-]*", shown.getvalue()))


def missing_options(text: str) -> list[str]:
    """List options of commands of ours, up to ` -- `, that these do not have."""
    return [
        f"kvtax {command} {option}"
        for command, rest in COMMAND.findall(text.replace("\\\n", " "))
        for option in re.findall(r"(?<!\S)--[a-z][\w-]*", rest.partition(" -- ")[0])
        if option not in options_of(command)
    ]


@pytest.fixture(params=documents(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def page(request) -> Path:
    return request.param


def test_every_link_leads_somewhere(page):
    assert dead_links(page) == []


def test_every_file_that_is_named_exists(page):
    if page != NAMES_VLLMS_FILES:
        assert missing_files(page) == []


def test_every_command_that_is_named_exists(page):
    assert missing_commands(page) == []


def test_every_option_that_is_named_exists(page):
    # The changes name what went.
    if page.name != "CHANGELOG.md":
        assert missing_options(page.read_text()) == []


def test_an_option_that_does_not_exist_is_noticed():
    text = "kvtax look x --out y \\\n  --none z; `kvtax run --fix a -- vllm --port 1`"
    assert missing_options(text) == ["kvtax look --none"]


def test_each_answer_names_its_command_or_the_commit_that_measured_it():
    text = (REPOSITORY / "docs" / "answers.md").read_text().replace("\\\n", "")
    for answer in text.split("\n## ")[1:]:
        commands = re.findall(r"^ {4}(\w.+)$", answer, flags=re.MULTILINE)
        (*measured,) = re.findall(r"Measured at (\w{7})", answer)
        assert commands or measured, answer
        for commit in measured:
            ancestor = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
            subprocess.run(ancestor, check=True, cwd=REPOSITORY)
        for command in commands:
            if command.startswith("kvtax axes"):
                # Without --again, no cell that is committed is measured.
                assert "--again" in command
                for connector in re.findall(r"--connector (\S+)", command):
                    load_connector(connector)


def test_what_does_not_exist_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](none.md) [b](#none) [c](#here) [d](page.md) [e](https://none)\n"
        "`kvtax/none.py`, `kvtax/paths.py`, `make none`, `make test`\n"
        "`python -m kvtax.none` `kvtax none x` `kvtax look y`\n"
        "and\n\n    python tests/none.py && python -m kvtax look x\n"
    )
    assert dead_links(page) == ["none.md", "#none"]
    assert missing_files(page) == ["kvtax/none.py", "tests/none.py"]
    assert missing_commands(page) == ["make none", "python -m kvtax.none", "kvtax none"]


def test_each_door_answers_in_its_first_section():
    """Who comes through one of README's four doors finds a short text."""
    readme = (REPOSITORY / "README.md").read_text()
    before, _, doors = readme.partition("## Four doors")
    assert "##" not in before
    rows = re.findall(r"^\*\*.*$", doors.partition("## ")[0], re.MULTILINE)
    pages = [re.search(r"\]\((.+?)\)", row)[1] for row in rows]
    assert len(pages) == 4
    words = {
        page: sum(map(len, map(str.split, sections[:2])))
        for page in pages
        if (sections := (REPOSITORY / page).read_text().split("\n## "))
    }
    assert {page: n for page, n in words.items() if n > 400} == {}


@pytest.mark.slow
def test_every_quoted_figure_is_that_of_the_committed_sweep():
    configs = figures.sweep()
    # Exempt from the rules for names of files, not from those for figures.
    pages = {*documents(), *REPOSITORY.glob("patches/upstream/*.md")}
    stale = [
        str(page.relative_to(REPOSITORY))
        for page in sorted(pages)
        if figures.written(page.read_text(), configs) != page.read_text()
    ]
    assert stale == [], "run python -m tools.figures"


def test_pages_are_written_together_or_not_at_all(tmp_path, monkeypatch, capsys):
    pages = {"a.md": "<!--sweep own-->1<!--/-->", "b.md": "<!--sweep gone-->1<!--/-->"}
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    monkeypatch.setattr(figures, "REPOSITORY", tmp_path)
    monkeypatch.setattr(figures, "sweep", lambda: {"configs": {}, "own": 2})
    monkeypatch.setattr(sys, "argv", ["figures"])
    assert figures.main() == 2
    assert "'gone'" in capsys.readouterr().err
    assert {name: (tmp_path / name).read_text() for name in pages} == pages


def test_a_figure_that_somebody_changed_is_noticed():
    slope = {"value": 57.72, "ci95": [51.6, 63.9]}
    walk = {"slope": slope, "p50": 1310.2, "verdict": "grows"}
    document = {"configs": {"walk": walk}, "window": {"at": 16_580}}
    page = (
        "<!--sweep walk.slope +.1f-->+57.7 [+51.6, +63.9]<!--/--> "
        "<!--sweep walk.p50 ,.0f-->1,310<!--/--> <!--sweep walk.verdict-->grows<!--/-->"
        " <!--sweep window.at ,-->16,580<!--/-->"
    )
    assert figures.written(page, document) == page
    assert figures.written(page.replace("57.7", "58.7"), document) == page
    with pytest.raises(figures.FigureError, match=r"walk\.p90"):
        figures.written(page.replace("p50", "p90"), document)
