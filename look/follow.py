# SPDX-License-Identifier: Apache-2.0
"""A view in the terminal of what servers record now."""

from __future__ import annotations

import copy
import time
from collections import defaultdict, deque
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from look.live import Watched

EVERY_S = 1.0
SPARKS = "▁▂▃▄▅▆▇█"
HISTORY = 60
METHODS_SHOWN = 8
# Of those that ended in the last second, the longest.
REQUESTS_SHOWN = 3


def follow(watched: Watched, seconds: float = float("inf")) -> None:
    """Show what comes until Ctrl-C, or for so many seconds."""
    console = Console()
    history: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))
    watched.read()
    before = copy.deepcopy(watched.totals)
    end_s = time.monotonic() + seconds
    with Live(console=console, auto_refresh=False) as live:
        while time.monotonic() < end_s:
            time.sleep(EVERY_S)
            now = watched.read()
            views = []
            for name, totals in now.items():
                told = totals.minus(before.get(name, type(totals)()))
                history[name].append(told["connector_us"])
                views.append(view(name, told, list(history[name])))
            live.update(
                Group(*views) if views else Text("No records yet."), refresh=True
            )
            before = copy.deepcopy(now)


def view(name: str, told: dict[str, Any], history: list[float]) -> Table:
    """One instance: a row per part, and above it what is there."""
    title = (
        f"{name}: {told['steps'] / EVERY_S:,.0f} steps/s, |cache| "
        f"{told['cache_blocks']:,} blocks, {told['running']} running, "
        f"{told['waiting']} waiting"
    )
    table = Table(title=Text(title), title_justify="left")
    table.add_column("µs per step")
    table.add_column("mean", justify="right")
    table.add_column("of the step", justify="right")
    rows = [("step", told["step_us"]), ("  model", told["model_us"])]
    rows += [("  scheduler", told["scheduler_us"])]
    rows += [("  connector", told["connector_us"])]
    methods = sorted(told["by_method_us"].items(), key=lambda item: -item[1])
    rows += [(f"    {method}", us) for method, us in methods[:METHODS_SHOWN]]
    for words, us in rows:
        share = us / told["step_us"] if told["step_us"] else 0.0
        table.add_row(Text(words), f"{us:,.1f}", f"{share:.1%}")
    table.add_row("connector, last minute", spark(history), "")
    for request in sorted(told["ended"], key=lambda one: -one.took_ms)[:REQUESTS_SHOWN]:
        words = f"request {request.id}, {request.prompt_tokens:,} tokens"
        kv = f"{request.kv_wait_ms:,.0f} ms for KV" if request.kv_wait_ns else ""
        # As text: an id may look like a mark of Rich's.
        table.add_row(Text(words), f"{request.took_ms:,.0f} ms", kv)
    return table


def spark(values: list[float]) -> str:
    """A line of bars, the highest for the highest value."""
    most = max(values, default=0.0)
    if most <= 0:
        return SPARKS[0] * len(values)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round(top * value / most)] for value in values)
