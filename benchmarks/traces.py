# SPDX-License-Identifier: Apache-2.0
"""Time and memory of `kvtax trace` over two million requests.

Makes up a trace in a temporary folder (1.2 GB; deleted at the end), describes it, takes
a sample of it and makes prompts. Each command is a process of its own; its time, CPU
time and peak resident memory come from the kernel. Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from kvtax_fleet.trace import Request
from kvtax_fleet.trace.prompts import prompt

from benchmarks.results import usage_of

# Two million requests of 20 turns each; the unlucky draw is 1 % below.
SESSIONS = 101_500
SAMPLED_REQUESTS = 20_000
PROMPT_TOKENS = 33_600
PROMPTS = 300


def command(name: str, *arguments: str) -> str:
    """Run `kvtax trace *arguments` and return its row of the table."""
    return f"| {name} | {usage_of('trace', *arguments)} |"


def prompts(block_tokens: int) -> str:
    """Time prompts of this block size; their row of the table."""
    blocks = PROMPT_TOKENS // block_tokens
    took_us = []
    for turn in range(PROMPTS):
        hashes = list(range(turn, turn + blocks))
        request = Request(0.0, "s", turn, PROMPT_TOKENS, 1, hashes, block_tokens)
        started = time.perf_counter_ns()
        prompt(request, 151_936)
        took_us.append((time.perf_counter_ns() - started) / 1e3)
    p50, p99 = np.percentile(took_us, (50, 99))
    return f"| {block_tokens} | {p50:.0f} | {p99:.0f} |"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench traces`."""
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--block-tokens", type=int, default=512)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        trace, cut = str(Path(folder, "trace.jsonl")), str(Path(folder, "cut.jsonl"))
        shape = (f"--sessions={arguments.sessions}", "--out", trace)
        size = f"--block-tokens={arguments.block_tokens}"
        print("| | s | CPU s | peak MiB |\n|---|---:|---:|---:|", flush=True)
        print(command("synth", "synth", size, *shape), flush=True)
        print(command("stats", "stats", trace), flush=True)
        lru = ("--cache-blocks", "100000")
        print(command("stats, LRU cache of 100,000 blocks", "stats", trace, *lru))
        sampled = min(SAMPLED_REQUESTS, 10 * arguments.sessions)
        wanted = ("--target-requests", str(sampled), "--seed", "0", "--out", cut)
        print(command(f"sample of {sampled:,} requests", "sample", trace, *wanted))
        with open(trace, "rb") as file:
            print(f"\n{Path(trace).stat().st_size / 1e9:.2f} GB; {file.readline()!r}")
    print(f"\nPrompts of {PROMPT_TOKENS:,} tokens, n = {PROMPTS}:\n")
    print("| tokens per block | µs p50 | p99 |\n|---:|---:|---:|")
    for block_tokens in (16, 64, 512):
        print(prompts(block_tokens))
    return 0
