# SPDX-License-Identifier: Apache-2.0
"""The top level of a JSON object, each value the bytes it is.

A parser looks at token ids one digit at a time. A long array of them is found by
searches that run at the speed of memory, taken out, and the rest is parsed.
"""

from __future__ import annotations

import re
import secrets

import msgspec
import numpy as np

Fields = dict[str, msgspec.Raw]
decode = msgspec.json.Decoder(Fields).decode
# What decoders raise: UnicodeDecodeError is a ValueError, too, and so is DecodeError.
UNREADABLE = (ValueError, RecursionError)

# Below, a parser is as fast.
_LONG_BYTES = 8192
_NAME = b'"prompt"'
_OPENS = re.compile(rb"\s*:\s*\[")
# Stands for the array while the rest is parsed. No client can guess it: where it comes
# out as the prompt, the array was the prompt and not part of something else.
_PLACE = b"[%d]" % secrets.randbits(63)


def top_level(raw: bytes) -> Fields:
    """Raises one of UNREADABLE, of which msgspec.ValidationError means: no object.

    A long `prompt` of nothing but digits, commas, points, signs and blanks is taken for
    an array of ids as it is: what is wrong inside it is the instance's to refuse.
    """
    found = _long_ids(raw) if len(raw) >= _LONG_BYTES else None
    if found is not None:
        start, end = found
        fields = decode(raw[:start] + _PLACE + raw[end:])
        if bytes(fields.get("prompt", b"")) == _PLACE:
            fields["prompt"] = msgspec.Raw(memoryview(raw)[start:end])
            return fields
    return decode(raw)


def _long_ids(raw: bytes) -> tuple[int, int] | None:
    """From the bracket that opens the first prompt's array to past the one that closes.

    None if there is none, or if it holds anything else than numbers.
    """
    name = raw.find(_NAME)
    opens = _OPENS.match(raw, name + len(_NAME)) if name >= 0 else None
    if opens is None:
        return None
    start, end = opens.end() - 1, raw.find(b"]", opens.end()) + 1
    if end - start < _LONG_BYTES:
        return None
    inside = np.frombuffer(raw, np.uint8, end - start - 2, start + 1)
    # All from "," to "9": these two, "-", "." and "/". Below "," it wraps around.
    numbers = np.count_nonzero(inside - np.uint8(ord(",")) <= ord("9") - ord(","))
    blanks = np.count_nonzero(inside == ord(" ")) if numbers < len(inside) else 0
    return (start, end) if numbers + blanks == len(inside) else None
