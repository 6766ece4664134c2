# SPDX-License-Identifier: Apache-2.0
"""An experiment in virtual time beside the same one in real time, as Markdown.

    python -m fleet.analyze.beside REAL VIRTUAL

Both are folders with an analysis.json. Latencies are of all requests, not only of those
in the steady window, which is another one in each run. Exit status 0; 2 with a message
if a file cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean

import msgspec

from fleet.analyze.frames import TITLES
from lab.records import RecordsError
from lab.stats.markdown import DASH, Document, table

SHOWN = ("p50", "p90")


def beside(real: Document, virtual: Document) -> str:
    """A row per arm of both: the cached share, and each latency's real level and the
    virtual one's difference from it.
    """
    rows = [
        [f"`{arm}`", *_cached(real, virtual, arm), *_latencies(real, virtual, arm)]
        for arm in real["arms"]
        if arm in virtual["arms"]
    ]
    head = ["arm", "cached, %", "virtual"]
    head += [f"{title} {q}, ms" for title in TITLES.values() for q in SHOWN]
    return table(head, rows)


def _cached(real: Document, virtual: Document, arm: str) -> list[str]:
    shares = [100 * cached_share(one["arms"][arm]) for one in (real, virtual)]
    return [f"{shares[0]:.1f}", f"{shares[1] - shares[0]:+.1f}"]


def cached_share(arm: Document) -> float:
    """Of the prompt tokens, by the requests' usage; the mean of the repeats."""
    return mean(one["apc"]["overall"]["apc_usage"] for one in arm["repeats"])


def _latencies(real: Document, virtual: Document, arm: str) -> list[str]:
    ours, theirs = (
        one["arms"][arm]["latency"]["all"]["all"] for one in (virtual, real)
    )
    return [
        _difference(ours[metric][q], theirs[metric][q])
        for metric in TITLES
        for q in SHOWN
    ]


def _difference(ours: Document | None, theirs: Document | None) -> str:
    if ours is None or theirs is None:
        return DASH
    percent = 100 * (ours["value"] / theirs["value"] - 1)
    return f"{theirs['value']:,.1f} {percent:+.1f} %"


def _read(folder: Path) -> Document:
    """Raises RecordsError."""
    path = folder / "analysis.json"
    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise RecordsError(f"{path}: {error}") from None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleet.analyze.beside", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("real", type=Path)
    parser.add_argument("virtual", type=Path)
    options = parser.parse_args()
    try:
        real, virtual = _read(options.real), _read(options.virtual)
    except RecordsError as error:
        print(f"fleet.analyze.beside: {error}", file=sys.stderr)
        return 2
    print(beside(real, virtual))
    return 0


if __name__ == "__main__":
    sys.exit(main())
