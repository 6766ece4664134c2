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
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes

from .apis import COMPLETIONS
from .body import Fields, RequestBody
from .chats import Unknown, chat_of, conversation

# Characters of text whose ids stay in memory: about 16 million tokens. A longer part
# than this is not kept, lest one prompt replaces what all others need.
CACHED_CHARS = 64 * 2**20
CACHED_PART_CHARS = 2**20
# Bytes of a prompt for each token that the model takes, at most: a longer one is hardly
# served, and not worth its ids. English text and code have 3 to 5 bytes a token.
MAX_BYTES_PER_TOKEN = 8
# Tokens that a model takes if its config.json does not say.
DEFAULT_MODEL_TOKENS = 131_072
# Bytes from which a prompt is long: 16,000 tokens or more, some 50 ms.
LONG_BYTES = 2**16
# Threads for long prompts; the short ones have a thread of their own.
LONG_THREADS = 2
# Seconds after which a request is routed without its ids.
TIME_LIMIT_S = 2.0


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
        self.max_bytes = MAX_BYTES_PER_TOKEN * _model_tokens(Path(path))
        self._backend = self._own.backend_tokenizer
        self._before, self._after = _added(self._backend)
        self._as_parts: dict[str, bool] = {}
        self._cuts = _cuts(self._backend)
        self._cached: OrderedDict[str, bytes] = OrderedDict()
        self._cached_chars = 0
        self._lock = Lock()  # of the cache
        with suppress(ValueError):  # without a template
            self._takes_parts(self._own.get_chat_template())

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
        text = self._own.apply_chat_template(
            conversation(chat.messages, self._takes_parts(template)),
            tools=chat.tools,
            chat_template=template,
            tokenize=False,
            **chat.options,
        )
        return self._text_ids(text, chat.special_tokens)

    def _takes_parts(self, template: str) -> bool:
        if template not in self._as_parts:
            self._as_parts[template] = _takes_parts(template)
        return self._as_parts[template]

    def _text_ids(self, text: str, special_tokens: bool) -> bytes:
        starts = [0, *(cut.start() for cut in self._cuts.finditer(text)), len(text)]
        parts = [self._part_ids(text[start:end]) for start, end in pairwise(starts)]
        if special_tokens:
            parts = [self._before, *parts, self._after]
        return b"[" + b",".join(filter(None, parts)) + b"]"

    def _part_ids(self, part: str) -> bytes:
        """Return the ids with commas between them."""
        with self._lock:
            if (kept := self._cached.get(part)) is not None:
                self._cached.move_to_end(part)
                return kept
        ids = self._backend.encode(part, add_special_tokens=False).ids
        written = msgspec.json.encode(ids)[1:-1]
        if len(part) <= CACHED_PART_CHARS:
            self._keep(part, written)
        return written

    def _keep(self, part: str, written: bytes) -> None:
        with self._lock:
            if part not in self._cached:
                self._cached_chars += len(part)
            self._cached[part] = written
            while self._cached_chars > CACHED_CHARS:
                oldest, _ = self._cached.popitem(last=False)
                self._cached_chars -= len(oldest)


class Tokens:
    """Puts token ids into requests, by threads beside the event loop.

    Long prompts have threads of their own, so that they hold up no short ones. A
    request whose ids cannot be computed, or not in time, is routed by its bytes, its
    session and the load; `unknown` counts these by reason.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._short = ThreadPoolExecutor(1, "tokenizer")
        self._long = ThreadPoolExecutor(LONG_THREADS, "tokenizer-long")
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
        if len(body.prompt) > self._tokenizer.max_bytes:
            raise Unknown("too long")
        threads = self._long if len(body.prompt) >= LONG_BYTES else self._short
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                return await loop.run_in_executor(
                    threads, self._tokenizer.ids, body.api.path, body.fields
                )
        except TimeoutError:
            raise Unknown("too slow") from None


class _Length(msgspec.Struct):
    max_position_embeddings: int | None = None


class _Config(_Length):
    """A model's config.json; `text_config` of models that take more than text."""

    text_config: _Length | None = None


def _model_tokens(folder: Path) -> int:
    """Return the tokens that the model takes. Raises TokenizerError."""
    path = folder / "config.json"
    if not path.exists():
        return DEFAULT_MODEL_TOKENS
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except msgspec.DecodeError as error:
        raise TokenizerError(f"--tokenizer {folder}: config.json: {error}") from None
    of_text = config.text_config and config.text_config.max_position_embeddings
    return config.max_position_embeddings or of_text or DEFAULT_MODEL_TOKENS


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
