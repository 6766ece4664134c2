# SPDX-License-Identifier: Apache-2.0
"""Processes in turn, resource use and result files, for studies and benchmarks."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvtax.engine import provenance
from kvtax.engine.engine_process import EngineProcess
from kvtax.engine.installation import Installation
from kvtax.records.files import write_document, write_whole
from kvtax.stats.distribution import SEED, Floats

VariantT = TypeVar("VariantT")


class BadArguments(Exception):
    """Arguments with which a benchmark cannot give a result."""

    exit_code = 2


class NotMeasured(Exception):
    """A benchmark that could not be carried out."""

    exit_code = 3


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a parser of integers that refuses numbers below `minimum`."""

    def parse(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"at least {minimum}, not {number}")
        return number

    return parse


def configure_rounds(
    parser: argparse.ArgumentParser, name: str, rounds: int, minimum: int = 1
) -> None:
    """Add --rounds, and --out for what `publish` writes."""
    parser.add_argument("--rounds", type=at_least(minimum), default=rounds)
    parser.add_argument("--out", type=Path, default=Path(f"runs/{name}.md"))


class Variant(NamedTuple):
    """Engine process to compare: patches, arguments of its worker, environment."""

    patches: list[str]
    arguments: tuple[str, ...] = ()
    env: dict[str, str] | None = None
    recording: bool = False


@contextmanager
def engines(
    worker: str, variants: dict[VariantT, Variant], **options: Any
) -> Iterator[dict[VariantT, EngineProcess]]:
    """Run an EngineProcess per variant, side by side. Raises ServerError."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                EngineProcess(
                    Path(folder, str(number)),
                    worker,
                    variant.patches,
                    *variant.arguments,
                    env=variant.env,
                    recording=variant.recording,
                    **options,
                )
            )
            for number, (name, variant) in enumerate(variants.items())
        }
        for process in processes.values():
            process.wait_ready()
        yield processes


def turns(variants: Iterable[VariantT], rounds: int) -> Iterator[tuple[int, VariantT]]:
    """Yield (round, variant), all variants in each round in an order drawn anew."""
    order, names = random.Random(SEED), list(variants)
    for number in range(rounds):
        for name in order.sample(names, len(names)):
            yield number, name


class Usage(NamedTuple):
    """Resources that a process used, as counted by the kernel."""

    wall_s: float
    cpu_s: float
    peak_mib: float


def usage_of(*arguments: str) -> Usage:
    """Run `kvtax *arguments` and return its resource use. Raises NotMeasured."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtax", *arguments], stdout=subprocess.DEVNULL
    )
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        command = " ".join(["kvtax", *arguments])
        raise NotMeasured(f"{command} exits with {process.returncode}")
    wall_s = time.perf_counter() - started
    return Usage(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def publish(
    name: str,
    out: Path,
    parts: list[str],
    results: dict[str, Any],
    patch_hashes: dict[str, str],
    installed: Installation | None = None,
    command: str | None = None,
) -> int:
    """Print the Markdown `parts`; write them to `out`, and `results` as JSON beside it.

    Both files have the provenance. `command` is the program of a study; without it the
    result is that of the benchmark `name`. Returns the exit code.
    """
    benchmarks = "python -m benchmarks"
    facts = provenance.collect(patch_hashes, command or benchmarks, installed)
    made = ["## How this was made", facts_list(facts)]
    text = "\n\n".join([f"# {command or f'{benchmarks} {name}'}", *parts, *made]) + "\n"
    print(text)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, text.encode())
    write_document(out.with_suffix(".json"), {"provenance": facts} | results)
    return 0


def facts_list(facts: dict[str, Any]) -> str:
    """Return the provenance as a Markdown list."""
    named = ["command_line", "date_utc", "vllm_version", "python_version", "cpu_model"]
    named += ["cpu_count", "kernel", "git_commit", "git_dirty"]
    lines = [f"- {key}: {facts[key]}" for key in named if facts.get(key) is not None]
    for title in ("patch_hashes", "package_versions"):
        listed = ", ".join(f"{k} {str(v)[:16]}" for k, v in facts[title].items())
        lines.append(f"- {title}: {listed}")
    return "\n".join(lines)


def quantiles(values: Floats) -> dict[str, float]:
    """Return p50, p99 and the maximum of `values`, or zeros without any."""
    return {
        name: float(np.quantile(values, q)) if len(values) else 0.0
        for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }
