# SPDX-License-Identifier: Apache-2.0
"""Anchors are found by syntax tree, exactly once, and nothing is guessed."""

import textwrap

import pytest

from kvtax.patcher.anchors import Source, parse_anchor
from kvtax.patcher.errors import AnchorError, ManifestError
from tests.patcher.patchlab import SCHEDULER

DEMO = """\
import os

x = {"a": 'b'}  # dict

if os.name == "nt":
    y = 1
elif os.name == "posix":
    y = 2
else:
    y = 3

try:
    z = 1
except ValueError:
    z = 2
    raise
finally:
    z = 4


class Outer:
    attribute: int = 1

    @staticmethod
    @property
    def method(
        a, b=1
    ) -> int:
        def inner():
            return 1
        value = [
            1,
            2,
        ]
        with open(a) as f, open(b) as g:
            match f:
                case 1:
                    g = 1
        async def later():
            await g
        return value

    class Inner:
        def method(self):
            return 1


a = 1; b = 2
if a: b = 3
for i in (1, 2): pass
"""


def source(text: str | bytes = DEMO) -> Source:
    data = text.encode() if isinstance(text, str) else text
    return Source(tuple(data.splitlines(keepends=True)), "demo.py")


def matches(scope: str, anchor: str, text: str | bytes = DEMO) -> list[bytes]:
    where = source(text)
    statement = where.find(scope, anchor)
    return list(where.lines[statement.start : statement.end])


@pytest.mark.parametrize(
    ("scope", "anchor", "first", "count"),
    [
        ("", "import os", b"import os\n", 1),
        ("", "x={'a':   'b'}", b"x = {", 1),
        ("", "x = {\n  'a': \"b\",\n}  # other comment", b"x = {", 1),
        ("", "if os.name == 'nt':", b"if os.name", 6),
        ("", "y = 3", b"    y = 3", 1),
        ("", "try:", b"try:\n", 7),
        ("", "raise", b"    raise", 1),
        ("", "z = 4", b"    z = 4", 1),
        ("", "class Outer:", b"class Outer:", 25),
        ("Outer", "attribute: int = 1", b"    attribute", 1),
        ("Outer", "def method(a, b=1) -> int:", b"    @staticmethod", 18),
        ("Outer.method", "value = [1, 2]", b"        value", 4),
        ("Outer.method", "with open(a) as f, open(b) as g:", b"        with", 4),
        ("Outer.method", "match f:", b"            match", 3),
        ("Outer.method", "g = 1", b"                    g", 1),
        ("Outer.method", "async def later():", b"        async", 2),
        ("Outer.method.later", "await g", b"            await", 1),
        ("Outer.method.inner", "return 1", b"            return", 1),
        ("Outer.Inner.method", "return 1", b"            return", 1),
        ("", "for i in (1, 2):", b"for i", 1),
        # Several statements that follow each other.
        ("", "z = 2\nraise", b"    z = 2", 2),
        ("", "import os\nx = {'a': 'b'}", b"import os\n", 3),
    ],
)
def test_the_statement_is_found_whatever_its_layout(scope, anchor, first, count):
    lines = matches(scope, anchor)
    assert lines[0].startswith(first)
    assert len(lines) == count


@pytest.mark.parametrize(
    ("scope", "anchor", "reason"),
    [
        ("Outer.method", "return 1", "matches 0"),  # in nested definitions only
        ("", "attribute: int = 1", "matches 0"),
        ("", "elsewhere = 1", "matches 0"),
        ("", "if os.name == 'posix':", "matches 0"),  # an elif is no statement
        ("Outer", "def method(a, b=2) -> int:", "matches 0"),
        ("Nowhere", "import os", "scope 'Nowhere' not found"),
        ("Outer.method.value", "import os", "no 'value' there"),
        ("", "a = 1", "shares a line"),
        ("", "b = 2", "shares a line"),
        ("", "b = 3", "shares a line"),
        ("", "z = 1\nz = 2", "matches 0"),  # not in one body
        ("", "import os\nimport os", "matches 0"),
        ("Outer.method", "g = 1\nreturn value", "matches 0"),
        ("", "a = 1\nb = 2", "shares a line"),
    ],
)
def test_what_is_not_there_or_not_alone_is_refused(scope, anchor, reason):
    with pytest.raises(AnchorError, match=reason) as refusal:
        source().find(scope, anchor)
    assert "demo.py" in str(refusal.value)


def test_an_ambiguous_anchor_is_refused_with_the_lines():
    with pytest.raises(AnchorError, match=r"matches 2 statements \(lines 2, 4\)"):
        source("if x:\n    y = 1\nelse:\n    y = 1\n").find("", "y = 1")


def test_the_statement_beside_an_ambiguous_one_says_which_is_meant():
    text = "def f():\n    wake()\n\n    # why\n    a = 1\n    wake()\n    b = 2\n"
    assert matches("f", "wake()\na = 1", text)[0] == b"    wake()\n"
    assert len(matches("f", "wake()\na = 1", text)) == 4
    assert matches("f", "wake()\nb = 2", text) == [b"    wake()\n", b"    b = 2\n"]


def test_a_compound_statement_with_its_body_is_compared_as_a_whole():
    text = "for x in a:\n    y = 1  # why\n\nfor x in a:\n    y = 2\n"
    with pytest.raises(AnchorError, match="matches 2 statements"):
        source(text).find("", "for x in a:")
    assert source(text).find("", "for x in a:\n  y = 2").start == 3
    assert source(text).find("", "for x in a: y = 1\nfor x in a: y = 2").end == 5
    with pytest.raises(AnchorError, match="matches 0 statements"):
        source(text).find("", "for x in a:\n    y = 3")


def test_a_getter_and_its_setter_are_told_apart_by_signature_or_decorator():
    getter = matches("Scheduler", "def load(self):", SCHEDULER)
    assert getter[0].strip() == b"@property"
    setter = matches("Scheduler", "@load.setter\ndef load(self, value):", SCHEDULER)
    assert len(setter) == 3
    inside = matches("Scheduler.load", "self.running = [0] * value", SCHEDULER)
    assert len(inside) == 1


@pytest.mark.parametrize("anchor", ["", "else:", "x = (", "x = 1\nif x:"])
def test_an_anchor_that_is_no_statement_or_header_is_refused(anchor):
    with pytest.raises(ManifestError, match="anchor"):
        parse_anchor(anchor)


def test_indent_is_what_the_tokenizer_sees():
    text = b"def f():\n\x0c\tx = 1\n\ty = 2\n"
    assert source(text).find("f", "x = 1").indent == b"\t"
    assert source(text).find("f", "y = 2").indent == b"\t"


def test_encodings_and_byte_order_mark_do_not_shift_lines():
    latin = "# coding: latin-1\ns = 'é'  # é\nt = 1\n".encode("latin-1")
    assert matches("", "s = 'é'", latin) == latin.splitlines(keepends=True)[1:2]
    marked = b"\xef\xbb\xbf" + textwrap.dedent("x = 'é'\n").encode()
    assert source(marked).find("", "x = 'é'").start == 0
