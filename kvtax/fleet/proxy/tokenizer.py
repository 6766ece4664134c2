# SPDX-License-Identifier: Apache-2.0
"""Token ids of a text or a chat, as vLLM makes them with the model's own tokenizer.

Tokenizers cut a text at their special tokens before anything else, and chat templates
write one around each message. A prompt is therefore put together from the ids of the
parts between them, and a session's next turn costs only its new text.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes

from .apis import COMPLETIONS
from .body import Fields, RequestBody
from .chats import Unknown, chat_of, conversation

# Characters of text whose ids stay in memory: about 16 million tokens.
CACHED_CHARS = 64 * 2**20


class TokenizerError(Exception):
    """No usable tokenizer; the message says what to change."""

    exit_code = 2


class Tokenizer:
    """The tokenizer and chat template of a model."""

    def __init__(self, path: str) -> None:
        """Load the model's folder `path`. Raises TokenizerError."""
        _check(Path(path))
        # The import takes seconds.
        from transformers import AutoTokenizer

        try:
            load: Any = AutoTokenizer.from_pretrained
            self._own = load(path)
        except (OSError, ValueError) as error:
            raise TokenizerError(f"--tokenizer {path}: {error}") from None
        self._backend = self._own.backend_tokenizer
        self._before, self._after = _added(self._backend)
        self._as_parts: dict[str, bool] = {}
        self._cuts = _cuts(self._backend)
        self._cached: OrderedDict[str, bytes] = OrderedDict()
        self._cached_chars = 0

    def ids(self, path: str, fields: Fields) -> bytes:
        """Return the prompt's ids as a JSON array. Raises Unknown."""
        try:
            request = {name: msgspec.json.decode(raw) for name, raw in fields.items()}
            if path != COMPLETIONS:
                return self._chat_ids(path, request)
            if request.get("truncate_prompt_tokens") or not request.get("prompt"):
                raise Unknown("truncation or template of the request")
            special = request.get("add_special_tokens", True)
            return self._text_ids(request["prompt"], special)
        except (
            *(KeyError, TypeError, AttributeError, ValueError, IndexError),
            *(RecursionError, jinja2.TemplateError),
        ) as error:
            # vLLM refuses what is malformed, and what the template does not take.
            raise Unknown("malformed") from error

    def _chat_ids(self, path: str, request: dict[str, Any]) -> bytes:
        chat = chat_of(path, request)
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
        starts = [0, *(cut.start() for cut in self._cuts.finditer(text)), len(text)]
        parts = [self._part_ids(text[start:end]) for start, end in pairwise(starts)]
        if special_tokens:
            parts = [self._before, *parts, self._after]
        return b"[" + b",".join(filter(None, parts)) + b"]"

    def _part_ids(self, part: str) -> bytes:
        """Return the ids with commas between them."""
        cached = self._cached
        if part in cached:
            cached.move_to_end(part)
            return cached[part]
        ids = self._backend.encode(part, add_special_tokens=False).ids
        cached[part] = written = msgspec.json.encode(ids)[1:-1]
        self._cached_chars += len(part)
        while self._cached_chars > CACHED_CHARS:
            oldest, _ = cached.popitem(last=False)
            self._cached_chars -= len(oldest)
        return written


class Tokens:
    """Puts token ids into requests, by a thread beside the event loop.

    A request whose ids cannot be computed is routed by its bytes, its session and the
    load; `unknown` counts these by reason.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        # One thread, which alone uses the tokenizer's cache.
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self.unknown: Counter[str] = Counter()

    async def find(self, body: RequestBody[Any]) -> None:
        """Put the ids into the body, unless they are there or cannot be computed."""
        if body.has_ids:
            return
        try:
            body.take_ids(await self._ids(body))
        except Unknown as why:
            self.unknown[str(why)] += 1

    async def _ids(self, body: RequestBody[Any]) -> bytes:
        if self._tokenizer is None:
            raise Unknown("no tokenizer")
        if body.form == "other":
            raise Unknown("several prompts")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, self._tokenizer.ids, body.api.path, body.fields
        )


def _check(folder: Path) -> None:
    """Refuse models whose chats vLLM renders by code of its own."""
    config = folder / "config.json"
    if not (folder / "tokenizer.json").exists():
        remedy = "no tokenizer.json there; give the folder of the model"
        raise TokenizerError(f"--tokenizer {folder}: {remedy}")
    gpt_oss = config.exists() and '"gpt_oss"' in config.read_text()
    if gpt_oss or (folder / "tekken.json").exists():
        why = "vLLM makes the prompts of gpt-oss and Mistral by code of its own"
        raise TokenizerError(f"--tokenizer {folder}: {why}; leave the option out")


def _added(backend: Any) -> tuple[bytes, bytes]:
    """Return the ids that the tokenizer adds before and after a text."""
    text = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    start = next(
        place for place in range(len(whole)) if whole[place : place + len(text)] == text
    )
    around = whole[:start], whole[start + len(text) :]
    before, after = (msgspec.json.encode(ids)[1:-1] for ids in around)
    return before, after


def _cuts(backend: Any) -> re.Pattern[str]:
    """Match each special token that is taken as it stands: cuts go before it."""
    tokens = [
        token.content
        for token in backend.get_added_tokens_decoder().values()
        if not (token.normalized or token.lstrip or token.single_word)
    ]
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    either = "|".join(map(re.escape, longest_first))
    return re.compile(either or "(?!)")


def _takes_parts(template: str) -> bool:
    """Return whether the template iterates over the parts of a message's content.

    Follows renderers/hf.py, _detect_content_format, which also checks that the loop is
    over messages.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compile_template: Any = _compile_jinja_template
    environment = compile_template(template).environment
    loops = environment.parse(template).find_all(nodes.For)
    return any(_is_content(loop.iter) for loop in loops)


def _is_content(over: nodes.Node | None) -> bool:
    """Return whether a node is `x.content` or `x["content"]`, whole or in part."""
    while isinstance(over, nodes.Filter | nodes.Test) or (
        isinstance(over, nodes.Getitem) and isinstance(over.arg, nodes.Slice)
    ):
        over = over.node
    if isinstance(over, nodes.Getattr):
        return over.attr == "content"
    return isinstance(over, nodes.Getitem) and (
        isinstance(over.arg, nodes.Const) and over.arg.value == "content"
    )
