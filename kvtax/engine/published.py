# SPDX-License-Identifier: Apache-2.0
"""Parts of a user's options and settings that a result, which is published, may keep.

A list says what is kept. Names of secrets are not guessed: all that is not in the list
is `***`, so a new option or setting stays private until it is entered here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvtax.paths import REPOSITORY

PRIVATE = "***"
_OPTION_NAMES = """
--again --block-size --check --connector --data-parallel-size --dtype --enforce-eager
--fix --gpu-memory-utilization --jobs --junit --kv-cache-dtype --limits --load-format
--max-model-len --max-num-batched-tokens --max-num-seqs --name --no-async-scheduling
--num-gpu-blocks-override --only --orders --patch --policy --profile
--profile-cpu --release --repeats --report --resume --rounds --seed --serve --setting
--tensor-parallel-size --virtual --vllm
"""
_TEXT_NAMES = """
CUDA_DEVICE_ORDER LMCACHE_TRACK_USAGE OMP_NUM_THREADS TORCHDYNAMO_DISABLE
VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_LOGGING_LEVEL arrival backends
colour kv_buffer_device kv_connector kv_connector_module_path kv_load_failure_policy
kv_role label layer many_decoders method module mooncake_protocol package patches
quantity role spec_name transfer type
"""
# Options whose values are kept, where these are plain.
OPTIONS = frozenset(_OPTION_NAMES.split())
# Names in free-form tables whose texts are kept: choices, no addresses and no paths.
TEXTS = frozenset(_TEXT_NAMES.split())
# Tables that hold whatever a connector or vLLM takes.
FREE_FORM = {
    *("companion", "connector_config", "engine_args", "env", "own"),
    *("kv_connector_extra_config", "kv_transfer_config", "server_args", "server_env"),
}
# No URL, which may have a token in its path, and no folder of one machine.
_PLAIN = re.compile(r"(?!/)(?!\S*(://|\.\./))[\w.,:+/-]{0,200}", re.ASCII)
_SECRET = re.compile(
    r"pass|pin|pwd|secret|credential|auth|otp|cookie|^tokens$|token$|keys?$|codes?$",
    re.IGNORECASE,
)
_WORD = re.compile(r"[a-z][a-z_-]{0,20}")
_OPTION = re.compile(r"(--[a-z][a-z0-9-]{0,40})(=.*)?", re.DOTALL)
# Names in free-form tables: others may be what they should only name.
_KEY = re.compile(r"[\w.-]{1,64}", re.ASCII)
# Users, passwords and parameters of a URL.
_URL = re.compile(r"(?<=://)\S*@|[?#;]\S+")


def published_arguments(argv: Sequence[str]) -> list[str]:
    """Return the arguments with `***` for each value that the list does not have."""
    return list(_arguments(argv))


def _arguments(argv: Sequence[str]) -> Iterator[str]:
    """Keep subcommands, files of the repository, names of options and listed values."""
    is_kept = is_leading = True
    for word in argv:
        option = _OPTION.fullmatch(word)
        if option:
            is_leading, is_kept = False, option[1] in OPTIONS
            value = option[2] or ""
            is_plain = is_kept and _PLAIN.fullmatch(value[1:])
            yield option[1] + (value if is_plain or not value else f"={PRIVATE}")
        elif is_leading:
            is_leading = is_kept = bool(_WORD.fullmatch(word)) or _is_ours(word)
            yield word if is_leading else PRIVATE
        else:
            yield word if is_kept and _PLAIN.fullmatch(word) else PRIVATE
            # An option that takes one value has had it.
            is_kept = False


def _is_ours(path: str) -> bool:
    return bool(_PLAIN.fullmatch(path)) and (REPOSITORY / path).is_file()


def published(value: Any, name: str = "", is_free_form: bool = False) -> Any:
    """Return a JSON value with `***` for each text that a result may not keep.

    `name` is that of the table or field that holds it. Tables for a connector or vLLM
    (FREE_FORM, and all `is_free_form`) keep listed texts, and numbers but for secrets.
    Our own settings are kept; their URLs lose users and parameters.
    """
    is_free_form = is_free_form or name in FREE_FORM
    if is_free_form and _is_secret(name) and not isinstance(value, bool | None):
        return PRIVATE
    if isinstance(value, dict):
        return {
            key if not is_free_form or _KEY.fullmatch(key) else PRIVATE: published(
                part, key, is_free_form
            )
            for key, part in value.items()
        }
    if isinstance(value, list):
        if name == "server_args":
            return published_arguments(["x", *value])[1:]
        return [published(part, name, is_free_form) for part in value]
    return _text(value, name, is_free_form) if isinstance(value, str) else value


def _text(text: str, name: str, is_free_form: bool) -> str:
    if is_free_form:
        return text if name in TEXTS and _PLAIN.fullmatch(text) else PRIVATE
    return _URL.sub(PRIVATE, text) if "://" in text else text


def _is_secret(name: str) -> bool:
    """Return whether what has that name may be a code, and no quantity."""
    return bool(_SECRET.search(name))
