# SPDX-License-Identifier: Apache-2.0
"""A report in Markdown as a page: its headings, paragraphs, tables and pictures."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from page.document import Page, Picture, Section, Table, Words

SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)


def page_of(text: str, folder: Path, made: str) -> Page:
    """The page of a report; pictures are read from `folder` and stand in the page.

    What stands before the first heading of the second level is the answer.
    """
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    title, answer, sections = "", [], []
    for heading, found in _sections(tokens):
        paragraphs: list[str] = []
        parts: list[Section] = []
        for kind, content in found:
            if kind == "title":
                title = content
            elif kind == "words":
                paragraphs.append(content)
            elif kind == "picture":
                png = (folder / content[1]).read_bytes()
                data = base64.b64encode(png).decode()
                parts.append(Picture(title=content[0], png=data))
            else:
                name, head, rows = content
                parts.append(
                    Table(
                        title=name or heading,
                        note=" ".join(paragraphs),
                        columns=head,
                        rows=rows,
                        open=not name,
                    )
                )
                paragraphs = []
        if heading is None:
            answer += paragraphs
        elif paragraphs:
            parts.append(Words(title=heading, paragraphs=paragraphs))
        sections += parts
    return Page(
        title=title,
        question="",
        answer=answer,
        warnings=[],
        sections=sections,
        made=made,
    )


def _sections(tokens: list[Token]) -> Iterator[tuple[str | None, list[tuple]]]:
    """(heading, what stands below it) for each heading below the title."""
    heading, found, hidden = None, [], None
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token.type == "heading_open":
            words = _words(tokens[at + 1])
            if token.tag == "h1":
                found.append(("title", words))
            else:
                yield heading, found
                heading, found = words, []
            at += 2
        elif token.type == "html_block":
            summary = SUMMARY.search(token.content)
            hidden = summary[1] if summary else None
        elif token.type == "table_open":
            end = _end(tokens, at, "table_close")
            head, *rows = _rows(tokens[at:end])
            found.append(("table", (hidden, head, rows)))
            at = end
        elif token.type == "inline":
            for image in (t for t in token.children or [] if t.type == "image"):
                found.append(("picture", (image.content, image.attrs["src"])))
            if words := _words(token):
                found.append(("words", words))
        elif token.type == "fence":
            found.append(("words", token.content.strip()))
        at += 1
    yield heading, found


def _end(tokens: list[Token], at: int, kind: str) -> int:
    return next(i for i in range(at, len(tokens)) if tokens[i].type == kind)


def _rows(tokens: list[Token]) -> list[list[str]]:
    rows: list[list[str]] = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline":
            rows[-1].append(_words(token))
    return rows


def _words(token: Token) -> str:
    """The text of a token without its marks."""
    told = []
    for child in token.children or []:
        if child.type in ("text", "code_inline"):
            told.append(child.content)
        elif child.type in ("softbreak", "hardbreak"):
            told.append(" ")
        elif child.type == "html_inline" and child.content.startswith("<br"):
            told.append("; ")
    return re.sub(r"\s+", " ", "".join(told)).replace(" ; ", "; ").strip()
