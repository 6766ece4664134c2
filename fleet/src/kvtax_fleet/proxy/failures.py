# SPDX-License-Identifier: Apache-2.0
"""Failures of requests, and how they are written in the form of each API."""

from __future__ import annotations

import msgspec

from .apis import COMPLETIONS, MESSAGES, RESPONSES

# From docs.anthropic.com/en/api/errors.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class Failure(Exception):
    """No answer: `status` goes to the client; `instance` failed, None if none did.

    `quoted` goes to the client with the message, and into no log: it may have text of
    the prompt.
    """

    def __init__(
        self, status: int, instance: str | None, message: str, quoted: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.instance = instance
        self.quoted = quoted


class UnknownModel(Failure):
    """No instance serves the model. Its name is the client's, and in no log."""

    def __init__(self, model: str) -> None:
        super().__init__(404, None, "no instance serves the model", model)


class Lost(Failure):
    """The instance broke off: it may be down."""


class Silent(Lost):
    """The instance sent nothing for too long: down, unless others hear from it."""


class Unreachable(Lost):
    """No connection, so that nothing has been sent."""


class ClientStalled(ConnectionResetError):
    """The client has stopped reading, and its connection has been ended."""


def error_json(error: Failure, path: str = COMPLETIONS) -> bytes:
    """Encode an error as the API at `path` does, with the instance that failed."""
    status = error.status
    message = f"{error}: {error.quoted}" if error.quoted else str(error)
    kind, param, anthropic_kind = "proxy_error", None, _ANTHROPIC_TYPES.get(status)
    if isinstance(error, UnknownModel):  # as vLLM
        message = f"The model `{error.quoted}` does not exist."
        kind, param, anthropic_kind = "NotFoundError", "model", "NotFoundError"
    text = {"message": message, "instance": error.instance}
    if path.startswith(MESSAGES):
        kind = anthropic_kind or "api_error"
        return msgspec.json.encode({"type": "error", "error": {"type": kind, **text}})
    openai = {**text, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": openai})


def error_event(error: Failure, path: str) -> bytes:
    """Encode an error inside a stream of the API at `path`."""
    data = error_json(error, path)
    if path == RESPONSES:
        # OpenAI's clients look for `error`, its documentation has a type and a message.
        fields = {"type": "error", "message": str(error), "error": msgspec.Raw(data)}
        data = msgspec.json.encode({**fields, **msgspec.json.decode(data)})
    event = b"data: " + data + b"\n\n"
    return b"event: error\n" + event if path in (MESSAGES, RESPONSES) else event
