# SPDX-License-Identifier: Apache-2.0
"""Requests as clients saw them, which shows the time outside the engine.

Load generators record how long each request took, and send its id as `X-Request-Id`
(kvtax.look.client_files). A client's request is the engine's that goes by this id and
has as many prompt and output tokens: a prefill that was sent elsewhere, or a try that
failed, goes by the same id and has other numbers. Where the client does not know what
the server counted, it is the one with most output tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from kvtax.look.client_files import (
    KINDS,
    ClientRequest,
    is_client_file,
    read_client_file,
)
from kvtax.look.discover import ServerFiles, files_below
from kvtax.look.instances import Instance
from kvtax.look.requests import FILE
from kvtax.records import RecordsError
from kvtax.records.parts import parts_of
from kvtax.records.requests import hashed_id, key_of_ids, read_engine_requests
from kvtax.records.warning import RECORD, RunWarning
from kvtax.report.document import Cell
from kvtax.stats.quantiles import quantile

SPANS = {"ttft": "client's TTFT", "e2e": "client's E2E"}
SHARES = (0.5, 0.9, 0.99)
TOKENS = ("prompt_tokens", "output_tokens")
TIMES = ("client_ttft_us", "client_e2e_us")
KEY: dict[str, type[pl.DataType]] = {"id": pl.String, **dict.fromkeys(TOKENS, pl.Int64)}
ENDED = KEY | {"finished_ns": pl.Int64}
SENT: dict[str, pl.DataType | type[pl.DataType]] = {
    "client_id": pl.String,
    "id": pl.List(pl.String),
    **{f"client_{name}": pl.Int64 for name in TOKENS},
    **dict.fromkeys(TIMES, pl.Float64),
}
OUTSIDE = ("client_id", *TIMES)


@dataclass(frozen=True)
class Clients:
    """KEY and OUTSIDE of requests that clients sent to each instance, by its name."""

    seen: dict[str, pl.DataFrame]
    warnings: list[RunWarning]

    def joined(self, instance: Instance) -> Instance:
        """Add OUTSIDE to the requests of `instance`, null without a client."""
        if instance.name not in self.seen:
            return instance
        requests = instance.requests.join(
            self.seen[instance.name], on=[*KEY], how="left", maintain_order="left"
        )
        # A client measures from before a request's arrival to after its end.
        before_us = pl.col("before_engine_us").fill_null(0)
        shorter = pl.any_horizontal(
            pl.col(f"client_{span}_us") < pl.col(f"{span}_us") + before_us
            for span in SPANS
        ).fill_null(value=False)
        doubtful = _warnings(
            "",
            client_shorter=(
                requests.filter(shorter).height,
                "{:,} requests took the client less time than the engine",
                "Their client times are left out; the file may be of another run",
            ),
        )
        return replace(
            instance,
            requests=requests.with_columns(pl.when(~shorter).then(pl.col(*OUTSIDE))),
            warnings=[*instance.warnings, *doubtful],
        )


def read_clients(folder: Path, servers: Sequence[ServerFiles]) -> Clients:
    """Read what clients of the `servers` wrote below `folder`, or beside it."""
    seen: dict[str, pl.DataFrame] = {}
    warnings: list[RunWarning] = []
    failed = unmatched = several = 0
    unrecorded: set[str] = set()
    for files, instances in _groups(folder, servers):
        sent, doubtful = _read(files)
        warnings += doubtful
        answered = sent.drop_nulls("client_e2e_us")
        matched = _matched(answered, {server.path.parent for server in instances})
        alone = matched.filter(
            pl.col("client").is_unique(), pl.col("request").is_unique()
        )
        failed += sent.height - answered.height
        unmatched += answered.height - matched["client"].n_unique()
        several += matched["client"].n_unique() - alone.height
        unrecorded |= {server.name for server in instances if not _has_requests(server)}
        if alone.height:
            seen |= {server.name: alone.select(*KEY, *OUTSIDE) for server in instances}
    why = (
        f"there is no {FILE} of {', '.join(sorted(unrecorded))}: {RECORD}"
        if unrecorded
        else "see whether what stands between passes X-Request-Id on; vLLM gives "
        "requests of /v1/responses no id of it"
    )
    warnings += _warnings(
        "",
        client_failed=(
            failed,
            "{:,} requests of clients were not answered in full",
            "They are in no figure of the clients; see their `error`",
        ),
        client_unmatched=(
            unmatched,
            "{:,} requests of clients are none that an engine recorded",
            f"Their time outside the engine is unknown; {why}",
        ),
        client_several=(
            several,
            "{:,} requests of clients may each be several that an engine recorded",
            "They are left out; give each request an id of its own",
        ),
    )
    return Clients(seen, warnings)


def on_the_way_us(span: str) -> pl.Expr:
    """Compute the client's wait outside the server, or before its tokens were sent."""
    inside = pl.col("before_engine_us") + pl.col(f"{span}_us")
    return pl.col(f"client_{span}_us") - inside


def outside(requests: pl.DataFrame) -> list[list[Cell]]:
    """Tabulate what clients waited for: its name; p50, p90 and p99 in ms.

    Over the requests that a client recorded; empty if there are none.
    """
    if TIMES[0] not in requests.columns:
        return []
    rows = []
    for span, whole in SPANS.items():
        known = requests.drop_nulls(f"client_{span}_us")
        if not known.height:
            continue
        parts = {
            whole: pl.col(f"client_{span}_us"),
            "of it before the engine": pl.col("before_engine_us"),
            "of it in the engine": pl.col(f"{span}_us"),
            "of it on the way": on_the_way_us(span),
        }
        for name, us in parts.items():
            ms = known.select(us / 1e3).to_series()
            rows.append([name, *(quantile(ms, share) for share in SHARES)])
    return rows


def _groups(
    folder: Path, servers: Sequence[ServerFiles]
) -> Iterator[tuple[list[Path], list[ServerFiles]]]:
    """Clients' files, and the instances that they tell of.

    An instance's are in the nearest folder above it that has some: a sweep has a
    driver for each server. Files above no instance tell of those that have none.
    """
    places: dict[Path, list[Path]] = {}
    for path in filter(is_client_file, _candidates(folder)):
        places.setdefault(path.parent, []).append(path)
    instances: dict[Path | None, list[ServerFiles]] = {None: []}
    for server in servers:
        above = (place for place in server.path.resolve().parents if place in places)
        instances.setdefault(next(above, None), []).append(server)
    others = [
        path for place in places if place not in instances for path in places[place]
    ]
    for place, of_place in instances.items():
        if files := others if place is None else places[place]:
            yield files, of_place


def _candidates(folder: Path) -> list[Path]:
    """List the files below `folder` and beside it that may be a client's."""
    beside = (p for kind in KINDS for p in folder.resolve().parent.glob(kind))
    below = (p for kind in KINDS for p in files_below(folder, kind))
    paths = sorted({path.resolve() for path in (*beside, *below)})
    return [path for path in paths if path.is_file()]


def _has_requests(instance: ServerFiles) -> bool:
    return any(part.is_file() for part in parts_of(instance.path.parent / FILE))


def _read(files: Sequence[Path]) -> tuple[pl.DataFrame, list[RunWarning]]:
    """Make a row per request of these clients; warn of what is wrong with the files."""
    rows: list[ClientRequest] = []
    warnings = []
    for path in files:
        try:
            read = read_client_file(path)
        except RecordsError as error:
            remedy = "What this client saw is left out; see the file"
            warnings.append(
                RunWarning("client_unreadable", path.name, str(error), remedy)
            )
            continue
        rows += read.requests
        warnings += _warnings(
            path.name,
            torn_lines=(
                read.torn_lines,
                "torn last line left out",
                "Nothing: a stopped writer leaves one",
            ),
            client_without_id=(
                read.without_id,
                "{:,} requests have no id by which the server knows them",
                "Give vllm bench serve --request-id-prefix PREFIX and "
                "--metadata request_id_prefix=PREFIX",
            ),
        )
    table = pl.DataFrame(rows, SENT, orient="row", strict=False)
    return table.with_row_index("client"), warnings


def _matched(answered: pl.DataFrame, folders: set[Path]) -> pl.DataFrame:
    """Pair each client's request with one that an engine recorded."""
    recorded = pl.concat([pl.DataFrame(schema=ENDED), *map(_recorded, sorted(folders))])
    # Plain, hashed as by older recorders, and with the key of each life.
    sent = answered.explode("id")
    keys = {b"", *map(key_of_ids, folders)}
    sent = pl.concat([sent, *(sent.with_columns(_hashed(sent["id"], k)) for k in keys)])
    pairs = recorded.with_row_index("request").join(sent, on="id")
    prompt, output = (pl.col(f"client_{name}") for name in TOKENS)
    own, in_all = pl.col("output_tokens"), pl.col("output_tokens").sum().over("client")
    equal = pairs.filter(
        (prompt == pl.col("prompt_tokens")).fill_null(value=True),
        ((output == own) | (output == in_all)).fill_null(value=True),
    )
    matched = equal.filter(output.is_not_null() | (own == own.max().over("client")))
    # Of several answers to one request, the client waited for the last.
    several = pl.col("id").n_unique().over("client") == pl.len().over("client")
    last = pl.col("finished_ns") == pl.col("finished_ns").max().over("client")
    return matched.filter(~several | last)


def _hashed(ids: pl.Series, key: bytes) -> pl.Series:
    return pl.Series("id", [hashed_id(name, key) for name in ids], pl.String)


def _recorded(folder: Path) -> pl.DataFrame:
    """Read ENDED of the requests that ended; none where kvtax.look.requests warns."""
    rows = []
    with suppress(RecordsError):
        records = read_engine_requests(folder / FILE, strict=False).records
        rows = [
            (record.id, record.prompt_tokens, record.output_tokens, record.finished_ns)
            for record in records
            if record.finished_ns is not None
        ]
    return pl.DataFrame(rows, ENDED, orient="row", strict=False)


def _warnings(place: str, **counts: tuple[int, str, str]) -> list[RunWarning]:
    """Make a warning of each kind whose count is above 0: count, message, remedy."""
    return [
        RunWarning(kind, place, message.format(count), remedy)
        for kind, (count, message, remedy) in counts.items()
        if count
    ]
