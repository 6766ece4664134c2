# SPDX-License-Identifier: Apache-2.0
"""The token ids that vLLM makes of a text or a chat, by the model's own tokenizer.

Tokenizers cut a text at their special tokens before anything else, and chat templates
write one around each message. So a prompt is put together from the ids of what is
between them, and a session's next turn costs its new text.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes

from .apis import COMPLETIONS
from .chats import Unknown, chat_of, conversation
from .top_level import Fields

# Of text whose ids are kept: about 16 million tokens.
KEPT_CHARS = 64 * 2**20


class TokenizerError(Exception):
    """No tokenizer there that could be used; the message says what to change."""


class Tokenizer:
    """Of the model in folder `path`. Raises TokenizerError."""

    def __init__(self, path: str) -> None:
        _check(Path(path))
        # Takes seconds, and nobody else needs it.
        from transformers import AutoTokenizer

        try:
            self._own = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise TokenizerError(f"--tokenizer {path}: {error}") from None
        self._backend = self._own.backend_tokenizer
        self._before, self._after = _added(self._backend)
        self._as_parts: dict[str, bool] = {}
        self._cuts = _cuts(self._backend)
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_chars = 0

    def ids(self, path: str, fields: Fields) -> bytes:
        """The prompt's ids as a JSON array. Raises Unknown."""
        try:
            asked = {name: msgspec.json.decode(raw) for name, raw in fields.items()}
            if path != COMPLETIONS:
                return self._chat_ids(path, asked)
            if asked.get("truncate_prompt_tokens") or not asked.get("prompt"):
                raise Unknown("truncation or template of the request")
            special = asked.get("add_special_tokens", True)
            return self._text_ids(asked["prompt"], special)
        except (
            *(KeyError, TypeError, AttributeError, ValueError, IndexError),
            *(RecursionError, jinja2.TemplateError),
        ) as error:
            # vLLM refuses what is malformed, and what the template does not take.
            raise Unknown("malformed") from error

    def _chat_ids(self, path: str, asked: dict[str, Any]) -> bytes:
        chat = chat_of(path, asked)
        try:
            template = self._own.get_chat_template(tools=chat.tools)
        except ValueError:
            raise Unknown("no chat template") from None
        if template not in self._as_parts:
            self._as_parts[template] = _takes_parts(template)
        text = self._own.apply_chat_template(
            conversation(chat.messages, self._as_parts[template]),
            tools=chat.tools,
            chat_template=template,
            tokenize=False,
            **chat.options,
        )
        return self._text_ids(text, chat.special_tokens)

    def _text_ids(self, text: str, special_tokens: bool) -> bytes:
        starts = [0, *(found.start() for found in self._cuts.finditer(text)), len(text)]
        parts = [self._part_ids(text[start:end]) for start, end in pairwise(starts)]
        if special_tokens:
            parts = [self._before, *parts, self._after]
        return b"[" + b",".join(filter(None, parts)) + b"]"

    def _part_ids(self, part: str) -> bytes:
        """The ids with commas between them."""
        kept = self._kept
        if part in kept:
            kept.move_to_end(part)
            return kept[part]
        ids = self._backend.encode(part, add_special_tokens=False).ids
        kept[part] = written = msgspec.json.encode(ids)[1:-1]
        self._kept_chars += len(part)
        while self._kept_chars > KEPT_CHARS:
            oldest, _ = kept.popitem(last=False)
            self._kept_chars -= len(oldest)
        return written


def _check(folder: Path) -> None:
    """vLLM renders the chats of these models by code of its own."""
    config = folder / "config.json"
    if not (folder / "tokenizer.json").exists():
        what = "no tokenizer.json there; the folder of the model is needed"
        raise TokenizerError(f"--tokenizer {folder}: {what}")
    gpt_oss = config.exists() and '"gpt_oss"' in config.read_text()
    if gpt_oss or (folder / "tekken.json").exists():
        what = "of gpt-oss and Mistral, vLLM makes prompts by code of its own"
        raise TokenizerError(f"--tokenizer {folder}: {what}; leave the option out")


def _added(backend: Any) -> tuple[bytes, bytes]:
    """The ids that the tokenizer adds before and after a text."""
    text = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    start = next(
        place for place in range(len(whole)) if whole[place : place + len(text)] == text
    )
    around = whole[:start], whole[start + len(text) :]
    before, after = (msgspec.json.encode(ids)[1:-1] for ids in around)
    return before, after


def _cuts(backend: Any) -> re.Pattern[str]:
    """Where a text may be cut: before each special token that is taken as it stands."""
    tokens = [
        token.content
        for token in backend.get_added_tokens_decoder().values()
        if not (token.normalized or token.lstrip or token.single_word)
    ]
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    either = "|".join(map(re.escape, longest_first))
    return re.compile(either or "(?!)")


def _takes_parts(template: str) -> bool:
    """Whether the template goes through the parts of a message's content.

    As renderers/hf.py, _detect_content_format, which also sees whether the loop is
    over messages.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    loops = environment.parse(template).find_all(nodes.For)
    return any(_is_content(loop.iter) for loop in loops)


def _is_content(over: nodes.Node) -> bool:
    """`x.content` or `x["content"]`, whole or in part."""
    while isinstance(over, nodes.Filter | nodes.Test) or (
        isinstance(over, nodes.Getitem) and isinstance(over.arg, nodes.Slice)
    ):
        over = over.node
    if isinstance(over, nodes.Getattr):
        return over.attr == "content"
    return isinstance(over, nodes.Getitem) and (
        isinstance(over.arg, nodes.Const) and over.arg.value == "content"
    )
