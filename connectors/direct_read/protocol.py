# SPDX-License-Identifier: Apache-2.0
"""The messages of direct read's side channel, and how both ends know who sent them.

A frame is its length in four bytes, big-endian, and then its content. The first frame
each way is a greeting: MAGIC and a fresh nonce. Each further one is sealed by a Seal:
HMAC-SHA256 over both nonces, the direction, the frame's number and the payload, and
then the payload, a message in msgpack. Requests and replies have the same numbers, so
a reply belongs to its request. The nonces are new for each connection, so a frame is
worth nothing on another connection. This needs neither clocks nor a list of used
nonces. A greeting proves nothing; the first sealed frame does.

The payload is authentic, not secret, and a block hash lets its bearer read the block:
hashes are in no log, no error and no repr.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Annotated, Any

import msgspec

MAGIC = b"kv-direct-read/3"
NONCE_BYTES = 16
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
MAC_BYTES = 32
LENGTH = struct.Struct(">I")
NUMBER = struct.Struct(">Q")

MAX_FRAME_BYTES = 1 << 20
# Before a client has proven itself, it only says hello.
MAX_FIRST_FRAME_BYTES = 1 << 10
MAX_HASHES = 4_096
MAX_HASH_BYTES = 64
MIN_SECRET_BYTES = 16

UInt = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
BlockHash = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_HASH_BYTES)]


class DirectReadError(Exception):
    """The side channel failed: unreachable, timeout, refused or wrong secret."""


class ProtocolError(Exception):
    """A frame that is not authentic, or whose message does not exist."""


class Message(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Hello(Message, tag="hello"):
    """Request for the peer's description. The reply is a Peer."""


class Lookup(Message, tag="lookup"):
    """Request for the leading run of readable blocks. The reply is an Offer.

    The hashes are block hashes as in `request.block_hashes`, without a group id.
    """

    hashes: Annotated[list[BlockHash], msgspec.Meta(max_length=MAX_HASHES)]

    def __repr__(self) -> str:
        return f"Lookup(<{len(self.hashes)} hashes>)"


class Validate(Message, tag="validate"):
    """Request to validate an offer's blocks. The reply is a Validated."""

    token: UInt


class WorkerAddress(Message):
    """Addresses of one worker's KV cache.

    `base_addresses` and `block_bytes` have one entry for each registered tensor: a
    block is at `base_addresses[i] + block_id * block_bytes[i]`.
    """

    session: str
    base_addresses: list[UInt]
    block_bytes: list[UInt]


class Peer(Message, tag="peer"):
    """An instance's fingerprint (see fingerprint.py), and its workers by TP rank."""

    fingerprint: dict[str, str]
    workers: list[WorkerAddress]


class Offer(Message, tag="offer"):
    """The blocks of a lookup's leading run that can be read now.

    Validating the token says afterwards how many of them count. `stopped` says why the
    run ended: "" if all blocks are there, "absent", or "in_flight" for a block cached
    in a step that has not ended. An offer of no blocks has token 0, which is never
    valid. `resets` is how often the prefix cache that holds the blocks had been reset,
    `weight_updates` how many calls of the workers may have changed the weights by then.
    """

    token: UInt
    block_ids: list[UInt]
    stopped: str
    resets: UInt = 0
    weight_updates: UInt = 0


class Validated(Message, tag="validated"):
    """Number of leading blocks of the offer that were still cached."""

    num_blocks: UInt


Request = Hello | Lookup | Validate
Reply = Peer | Offer | Validated

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def check_secret(secret: bytes) -> bytes:
    """Return the secret. Raises ValueError if it is too short."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"the secret must have at least {MIN_SECRET_BYTES} bytes")
    return secret


def framed(content: bytes) -> bytes:
    if len(content) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(content)} bytes is too long")
    return LENGTH.pack(len(content)) + content


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def nonce_of(greeting: bytes) -> bytes:
    """Return the nonce of a greeting. Raises ProtocolError if the frame is none."""
    if len(greeting) != GREETING_BYTES or not greeting.startswith(MAGIC):
        raise ProtocolError("no greeting of direct read")
    return greeting[len(MAGIC) :]


class Seal:
    """One end's view of a connection: seals what it sends, opens what it receives.

    An opened frame was sealed by an end that holds the secret, for this connection,
    this direction and this place in it. A frame that was not changes nothing, so the
    next one may still be opened. Use one Seal per connection, from one thread at a
    time.
    """

    def __init__(
        self, secret: bytes, server_nonce: bytes, client_nonce: bytes, *, server: bool
    ) -> None:
        self._secret = check_secret(secret)
        nonces = server_nonce + client_nonce
        labels = (b"reply" + nonces, b"query" + nonces)
        self._sends, self._receives = labels if server else labels[::-1]
        self._decode = _decode_request if server else _decode_reply
        self._num_sent = self._num_received = 0

    def seal(self, message: Request | Reply) -> bytes:
        """Return the frame's content. Raises ProtocolError if it is too long."""
        payload = _encode(message)
        if MAC_BYTES + len(payload) > MAX_FRAME_BYTES:
            raise ProtocolError(f"a message of {len(payload)} bytes is too long")
        mac = self._mac(self._sends, self._num_sent, payload)
        self._num_sent += 1
        return mac + payload

    def open(self, content: bytes) -> Any:
        """Return the message in a frame's content.

        Raises ProtocolError if it is not authentic, or is not the expected message.
        """
        if not MAC_BYTES < len(content) <= MAX_FRAME_BYTES:
            raise ProtocolError("a frame of the wrong length")
        mac, payload = content[:MAC_BYTES], content[MAC_BYTES:]
        expected = self._mac(self._receives, self._num_received, payload)
        if not hmac.compare_digest(mac, expected):
            raise ProtocolError("a frame that is not authentic")
        self._num_received += 1
        try:
            return self._decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # A ValueError is text that is not UTF-8, and quotes it: so from None.
            raise ProtocolError("an authentic frame with no message") from None

    def _mac(self, label: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(
            self._secret, label + NUMBER.pack(number) + payload, hashlib.sha256
        )
