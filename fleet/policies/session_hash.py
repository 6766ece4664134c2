# SPDX-License-Identifier: Apache-2.0
"""session_hash: a hash of its name gives a session its instance, whatever the load.

score = a hash of session and instance, between 0 and 1 (rendezvous hashing: Thaler and
Ravishankar, 1998). If an instance comes or goes, only the sessions that it gets or had
move. A request without a session is one of its own.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from .decision import Ask, Decision, Snapshot, lowest, placed, serving

HASH_BYTES = 8


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None."""


def decide(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> Decision:
    """Raises NoInstance."""
    candidates = serving(snapshot)
    session = f"#{snapshot.arrivals}" if ask.session is None else ask.session
    scores = [_hash(f"{session}\0{one.name}") for one in candidates]
    best = lowest(candidates, scores, snapshot.arrivals)
    return placed(candidates, scores, best, "the session's hash")


def _hash(text: str) -> float:
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=HASH_BYTES)
    return int.from_bytes(digest.digest()) / 256**HASH_BYTES
