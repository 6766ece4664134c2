# SPDX-License-Identifier: Apache-2.0
"""How a cost's result is kept: Markdown, and beside it JSON with the provenance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.records.documents import write_document, write_whole


def facts_list(facts: dict[str, Any]) -> str:
    """The provenance as a Markdown list."""
    named = ("command_line", "date_utc", "vllm_version", "python_version", "cpu_model")
    named += ("cpu_count", "kernel", "git_commit", "git_dirty")
    lines = [f"- {key}: {facts[key]}" for key in named if facts.get(key) is not None]
    for title in ("patch_hashes", "package_versions"):
        listed = ", ".join(f"{k} {str(v)[:16]}" for k, v in facts[title].items())
        lines.append(f"- {title}: {listed}")
    return "\n".join(lines)


def write_result(out: Path, document: dict[str, Any], text: str = "") -> None:
    """`document` into `out` as JSON, or beside the Markdown `text` that is in `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if text:
        write_whole(out, text.encode())
    write_document(out.with_suffix(".json"), document)


def quantiles(values: NDArray[np.float64]) -> dict[str, float]:
    """p50, p99 and the maximum of `values`; zeros if there are none."""
    return {
        name: float(np.quantile(values, q)) if len(values) else 0.0
        for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }
