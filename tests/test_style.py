# SPDX-License-Identifier: Apache-2.0
"""The lint names each place that breaks a rule of CONTRIBUTING.md."""

from __future__ import annotations

import ast

import pytest

from tools.style import MOST_WORDS, faults_of, long_sentences


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("one = 1", "'one' says nothing"),
        ("for found in (): pass", "'found' says nothing"),
        ("def told(): pass", "'told' says nothing"),
        ("def name(one): pass", "'one' says nothing"),
        ("class Row:\n    found: int", "'found' says nothing"),
        ("async def name():\n    'What is told.'", "begins with 'What'"),
        ("class Row:\n    'Of a request.'", "begins with 'Of'"),
        ("def name():\n    'The exit status.'", "begin with a verb"),
        ("assert sorted(rows)", "python -O"),
    ],
)
def test_a_broken_rule_is_named_with_its_line(code: str, fault: str):
    ((line, text),) = faults_of(ast.parse(code), of_test=False)
    assert fault in text and line <= 2


@pytest.mark.parametrize(
    "code",
    [
        "def name(trial):\n    'Return the trial.'",
        "class Row:\n    'A row.'",
        "class Row:\n    @property\n    def size(self):\n        'The size.'",
        "assert len(rows) and isinstance(row, int)",
        "from told import one",
    ],
)
def test_what_keeps_the_rules_is_not_named(code: str):
    assert list(faults_of(ast.parse(code), of_test=False)) == []


def test_a_test_needs_names_too_but_may_assert_what_it_calls():
    code = "def test_row():\n    'What holds.'\n    found = 1\n    assert sorted(rows)"
    ((_, text),) = faults_of(ast.parse(code), of_test=True)
    assert "'found' says nothing" in text


def test_a_long_sentence_is_found_in_prose_and_not_in_code_or_tables():
    long = "word " * MOST_WORDS + "end."
    assert len(list(long_sentences(f"Short. {long}"))) == 1
    assert list(long_sentences(f"    {long}\n\n| {long} |\n\n```\n{long}\n```")) == []
