# SPDX-License-Identifier: Apache-2.0
"""What would make every request of a replay fail, found before the first is sent."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec

from fleet.replay.client import authorization
from fleet.replay.options import ReplayError
from fleet.replay.records import asked_output_tokens
from fleet.replay.sessions import Session
from fleet.trace.prompts import prompt

TIMEOUT_S = 30.0


class Model(msgspec.Struct):
    """One entry of /v1/models; `max_model_len` is vLLM's."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


async def find_model(
    session: aiohttp.ClientSession, url: str, name: str | None
) -> Model:
    """The model called `name`, or the only one there is. Raises ReplayError.

    A server without /v1/models is taken at its word for a given name.
    """
    where = f"{url}/v1/models"
    try:
        async with (
            asyncio.timeout(TIMEOUT_S),
            session.get(where, headers=authorization()) as response,
        ):
            status, body = response.status, await response.read()
    except TimeoutError:
        raise ReplayError(f"{where}: no answer within {TIMEOUT_S:g} s") from None
    except aiohttp.ClientError as error:
        raise ReplayError(f"{where}: {error}: is the server running?") from None
    if status in (404, 405, 501) and name is not None:
        return Model(name)
    if status != 200:
        raise ReplayError(f"{where}: HTTP {status}: {body[:200]!r}; or give --model")
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except msgspec.DecodeError as error:
        raise ReplayError(f"{where}: {error}") from None
    named = [model for model in models if name in (None, model.id)]
    if len(named) == 1 or (named and name is not None):
        return named[0]
    there = ", ".join(model.id for model in models) or "none"
    raise ReplayError(
        f"{where}: no model {name!r}, there is: {there}"
        if name is not None
        else f"{where}: choose one with --model, there is: {there}"
    )


def check_vocabulary(sessions: list[Session], vocab_size: int) -> None:
    """Raises ReplayError if the blocks of the trace cannot be told apart with it."""
    try:
        prompt(sessions[0].turns[0], vocab_size)
    except ValueError as error:
        raise ReplayError(f"--vocab-size {vocab_size}: {error}") from None


def check_lengths(sessions: list[Session], model: Model) -> None:
    """Raises ReplayError if a request does not fit into the model's context."""
    if model.max_model_len is None:
        return
    too_long = [
        request
        for session in sessions
        for request in session.turns
        if request.input_tokens + asked_output_tokens(request) > model.max_model_len
    ]
    if not too_long:
        return
    first = too_long[0]
    raise ReplayError(
        f"{len(too_long)} requests are longer than the {model.max_model_len} tokens "
        f"that {model.id} takes, the first is {first.session}/{first.turn} with "
        f"{first.input_tokens} in the prompt and {asked_output_tokens(first)} in the "
        "answer: serve with a larger --max-model-len, or leave these sessions out"
    )
