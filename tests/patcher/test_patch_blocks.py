# SPDX-License-Identifier: Apache-2.0
"""parse and render are exact inverses, and damaged text is refused."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtax.patcher.blocks import (
    MARK,
    Added,
    Block,
    fingerprint,
    make_block,
    parse,
    parse_added,
    read,
    render,
    render_added,
)
from kvtax.patcher.errors import DamagedError
from tests.patcher.patchlab import FOREIGN

TEXT = st.binary(max_size=200).filter(lambda text: MARK not in text)
CONTENT = TEXT.map(lambda text: text.replace(b"\n", b"").replace(b"\r", b""))
CONTENT = CONTENT.filter(lambda text: MARK not in text)
ENDINGS = st.sampled_from([b"\n", b"\r\n"])
INDENTS = st.sampled_from([b"", b"    ", b"\t", b"\t\t", b"        "])


@st.composite
def patched(draw):
    """Pristine lines and blocks that do not overlap, in canonical order."""
    lines = [draw(CONTENT) + draw(ENDINGS) for _ in range(draw(st.integers(1, 8)))]
    if draw(st.booleans()):
        lines[-1] = lines[-1].rstrip(b"\r\n") or b"x"
    blocks = []
    used = 0
    for order in range(draw(st.integers(0, 5))):
        at = draw(st.integers(used, len(lines)))
        until = draw(st.integers(at, len(lines)))
        code = draw(st.lists(st.sampled_from(["x = 1", "", "# y"]), min_size=1))
        name = (draw(st.sampled_from(["v1", "v2", "a.b-c"])), f"b{order}")
        text = "\n".join(code)
        blocks.append(
            make_block(name, lines, (at, until), draw(INDENTS), text, (False, order))
        )
        used = until
    return tuple(lines), tuple(sorted(blocks, key=Block.sort_key))


@given(patched())
def test_parse_gives_back_what_render_was_given(case):
    lines, blocks = case
    assert parse(render(lines, blocks)) == (lines, blocks)


@pytest.mark.slow
@given(patched())
def test_render_gives_back_the_text_that_was_parsed(case):
    text = render(*case)
    assert render(*parse(text)) == text


@pytest.mark.slow
@given(patched(), st.randoms(use_true_random=False))
def test_render_does_not_depend_on_the_order_of_the_blocks(case, random):
    lines, blocks = case
    shuffled = list(blocks)
    random.shuffle(shuffled)
    assert render(lines, shuffled) == render(lines, blocks)


@given(TEXT)
def test_text_without_sentinels_is_all_pristine(text):
    lines, blocks = parse(text)
    assert b"".join(lines) == text
    assert blocks == ()


OURS = {"ours": None}


def one_block(where="before") -> tuple[tuple[bytes, ...], Block]:
    lines = (b"def f():\n", b"    a = 1\n", b"    b = 2\n")
    until = 2 if where == "replace" else 1
    return lines, make_block(("v1", "x"), lines, (1, until), b"    ", "c = 3")


def test_a_block_looks_as_documented():
    lines, block = one_block("replace")
    between = [b"    # WAS:     a = 1\n", b"    c = 3\n"]
    assert render(lines, [block]) == (
        b"def f():\n"
        b"    # BLOCK_BEGIN v1:x %s was=1\n"
        b"%s"
        b"    # BLOCK_END v1:x %s\n"
        b"    b = 2\n"
    ) % ((check := fingerprint(between).encode()), b"".join(between), check)


@pytest.mark.parametrize("where", ["before", "replace"])
def test_any_edit_between_the_sentinels_is_seen(where):
    lines, block = one_block(where)
    text = render(lines, [block])
    begin = text.index(b"\n", text.index(b"BLOCK_BEGIN")) + 1
    end = text.index(b"    # BLOCK_END")
    for place in range(begin, end - 1):
        edited = text[:place] + b"#" + text[place + 1 :]
        if edited != text:
            assert [bool(b.edited) for b in parse(edited).blocks] == [True]
    shorter = text[:begin] + text[end:]
    assert [bool(b.edited) for b in parse(shorter).blocks] == [True]


def begin_end(text: bytes) -> tuple[bytes, bytes]:
    lines = text.splitlines(keepends=True)
    return tuple(next(x for x in lines if k in x) for k in (b"_BEGIN", b"_END"))


def test_half_or_malformed_sentinels_are_refused_with_their_line():
    text = render(*(lambda lines, block: (lines, [block]))(*one_block()))
    begin, end = begin_end(text)
    damaged = {
        "no end": text.replace(end, b""),
        "no begin": text.replace(begin, b""),
        "other end": text.replace(end, end.replace(b"v1:x", b"v1:y")),
        "end indent": text.replace(end, end.lstrip()),
        "no check": text.replace(begin, b"    # BLOCK_BEGIN v1:x\n"),
        "half an end": text.replace(end, end[:-4] + b"\n"),
        "a whole file's": text.replace(b"v1:x", b"v1:x.py"),
    }
    for what, broken in damaged.items():
        with pytest.raises(DamagedError, match=r"^f\.py:"):
            parse(broken, "f.py")
            pytest.fail(what)


def test_a_block_that_a_merge_doubled_is_read_once():
    lines, block = one_block()
    text = render(lines, [block])
    whole = b"".join(block.text)
    assert parse(text.replace(whole, whole + whole)) == (lines, (block,))
    apart = parse(text.replace(whole, whole + b"between = 1\n" + whole))
    assert apart.blocks == (block,)
    edited = whole.replace(b"c = 3", b"c = 4")
    with pytest.raises(DamagedError, match="stands here twice"):
        parse(text.replace(whole, whole + edited))


def test_a_replacement_that_a_merge_doubled_gives_its_lines_back_once():
    lines, block = one_block("replace")
    whole = b"".join(block.text)
    text = render(lines, [block]).replace(whole, whole + whole)
    assert parse(text) == (lines, (block,))


def test_half_a_sentinel_beside_the_whole_block_is_text_of_others():
    lines, block = one_block()
    text = render(lines, [block])
    begin, end = begin_end(text)
    for doubled in (text.replace(begin, begin + begin), text + end):
        assert [parsed.text for parsed in parse(doubled).blocks] == [block.text]


@pytest.mark.parametrize("prefix", [b"", b"f", b"rb"])
@pytest.mark.parametrize("quote", [b"'" * 3, b'"' * 3])
def test_a_block_inside_of_a_string_is_text(prefix, quote):
    lines, block = one_block()
    text = render(lines, [block])
    note = b"\nNOTE = %b%b\n%b%b\n" % (prefix, quote, b"".join(block.text), quote)
    parsed = parse(text + note)
    assert parsed.blocks == (block,)
    assert b"".join(parsed.lines).endswith(note)
    assert render(*parsed) == text + note


def test_a_block_of_a_known_patch_that_its_manifest_lacks_is_text_of_others():
    text = b"# BLOCK_BEGIN v1:mine 01234567\nx = 1\n# BLOCK_END v1:mine 01234567\n"
    begin, _, end = text.splitlines(keepends=True)
    for foreign in (text, begin, end):
        assert parse(foreign, ours={"v1": {"x"}}).blocks == ()
        assert render(*parse(foreign, ours={"v1": {"x"}})) == foreign
    assert parse(text, ours={"v1": None}).blocks[0].edited


# All of FOREIGN together are many examples.
@pytest.mark.parametrize("foreign", FOREIGN)
@settings(max_examples=settings().max_examples // 3)
@given(patched(), st.data())
def test_whatever_is_no_block_of_ours_is_text_of_others(foreign, case, data):
    lines, blocks = case
    assume(lines[-1].endswith(b"\n"))
    text = render(lines, blocks).splitlines(keepends=True)
    outside = [0, len(text)]
    outside += [n for n, line in enumerate(text) if b"# BLOCK_BEGIN" in line]
    outside += [n + 1 for n, line in enumerate(text) if b"# BLOCK_END" in line]
    places = data.draw(st.lists(st.sampled_from(outside), min_size=2, max_size=2))
    for place, line in zip(sorted(places)[::-1], foreign[::-1], strict=True):
        text.insert(place, line.encode() + b"\n")
    parsed = parse(b"".join(text), ours={})
    assert [b.text for b in parsed.blocks] == [b.text for b in blocks]
    assert render(*parsed) == b"".join(text)
    left = [line for line in parsed.lines if line.rstrip().decode("latin1") in foreign]
    assert len(left) >= 2


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("at", range(5))
def test_a_foreign_block_anywhere_in_a_block_of_ours_goes_below_or_above(foreign, at):
    lines = (b"def f():\n", b"    a = 1\n")
    code = "c = 3\nif c:\n    c = 4"
    block = make_block(("ours", "x"), lines, (1, 2), b"    ", code)
    own = render(lines, [block]).splitlines(keepends=True)
    theirs = [f"    {line}\n".encode() for line in (foreign[0], "v = 1", foreign[1])]
    parsed = parse(b"".join([*own[: 2 + at], *theirs, *own[2 + at :]]), ours=OURS)
    assert [b.text for b in parsed.blocks] == [block.text]
    assert not parsed.blocks[0].edited
    around = [*theirs, lines[1]] if at == 0 else [lines[1], *theirs]
    assert parsed.lines == (lines[0], *around)
    # Deeper in our code it gets our indent; if it uses what ours binds, it cannot.
    deeper = [b"    " + line for line in theirs]
    parsed = parse(b"".join([*own[: 2 + at], *deeper, *own[2 + at :]]), ours=OURS)
    assert (parsed.lines, parsed.blocks[0].edited) == ((lines[0], *around), False)
    deeper[1] = deeper[1].replace(b"v = 1", b"v = c")
    parsed = parse(b"".join([*own[: 2 + at], *deeper, *own[2 + at :]]), ours=OURS)
    assert parsed.blocks[0].edited


ADDED = Added("v1/new.py", ("a", "b"), b"x = 1\n")


@given(
    st.lists(st.sampled_from(["v1", "v2", "v3"]), min_size=1, unique=True),
    st.lists(CONTENT),
)
def test_an_added_file_parses_back(owners, lines):
    content = b"".join(line + b"\n" for line in lines)
    added = Added("v1/new.py", tuple(owners), content)
    assert parse_added(render_added(added), "v1/new.py") == added


def test_an_added_file_that_was_touched_outside_or_moved_is_refused():
    text = render_added(ADDED)
    end = begin_end(text)[1]
    for broken in (text + b"y = 2\n", text.replace(end, b""), b"\n" + text):
        with pytest.raises(DamagedError, match=r"v1/new\.py"):
            read(broken, "v1/new.py")
    with pytest.raises(DamagedError, match="moved"):
        read(text, "v1/other.py")
    assert parse_added(text.replace(b"x = 1", b"x = 2"), "v1/new.py").edited
