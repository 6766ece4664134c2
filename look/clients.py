# SPDX-License-Identifier: Apache-2.0
"""What clients saw of the requests, so that what lies outside the engine can be told.

The load driver and the fleet's replayer record when they sent each request and when its
tokens came, and send its id as `X-Request-Id`. A client's request is the engine's that
goes by this id and has as many prompt and output tokens: a prefill that was sent
elsewhere, or a try that failed, goes by the same id and has other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from lab.records import RecordsError
from lab.records.engine_requests import ids_of_completion, read_engine_requests
from lab.records.lines import read_lines
from lab.records.outcome import Outcome
from lab.records.replay import ReplayedRequest, ReplayEnd, ReplayHeader, in_header
from lab.records.requests import read_requests
from lab.records.warning import RunWarning
from look.found import Found
from look.instances import Instance
from look.requests import FILE

DRIVER, REPLAYER = "requests.jsonl", "replay.jsonl"
SPANS = {"ttft": "client's TTFT", "e2e": "client's E2E"}
SHARES = (0.5, 0.9, 0.99)
NAMES = ("plain", "hashed")
TOKENS = ("prompt_tokens", "output_tokens")
TIMES = ("client_ttft_us", "client_e2e_us")
KEY = {"id": pl.String, **dict.fromkeys(TOKENS, pl.Int64)}
ASKED = dict.fromkeys(NAMES, pl.String) | dict.fromkeys(TOKENS, pl.Int64)
ASKED |= dict.fromkeys(TIMES, pl.Float64)


@dataclass(frozen=True)
class Clients:
    """KEY and TIMES of the requests that clients sent to each instance, by its name."""

    seen: dict[str, pl.DataFrame]
    warnings: list[RunWarning]

    def joined(self, instance: Instance) -> Instance:
        """`instance` with TIMES of its requests, null where no client told them."""
        if instance.name not in self.seen:
            return instance
        requests = instance.requests.join(
            self.seen[instance.name], on=[*KEY], how="left", maintain_order="left"
        )
        # A client measures from before a request's arrival to after its end.
        shorter = pl.any_horizontal(
            pl.col(f"client_{span}_us") < pl.col(f"{span}_us") for span in SPANS
        ).fill_null(value=False)
        doubtful = _warnings(
            client_shorter=(
                requests.filter(shorter).height,
                "{:,} requests took the client less time than the engine",
                "What the client says of them is left out; is it of another run?",
            )
        )
        return replace(
            instance,
            requests=requests.with_columns(pl.when(~shorter).then(pl.col(*TIMES))),
            warnings=[*instance.warnings, *doubtful],
        )


def read_clients(folder: Path, found: Sequence[Found]) -> Clients:
    """What clients of the instances `found` wrote below `folder`, or beside it."""
    seen: dict[str, pl.DataFrame] = {}
    warnings: list[RunWarning] = []
    failed = unmatched = several = 0
    for files, instances in _groups(folder, found):
        asked, doubtful = _read(files)
        warnings += doubtful
        answered = asked.drop_nulls(TIMES)
        matched = _matched(answered, {one.path.parent for one in instances})
        alone = matched.filter(
            pl.col("client").is_unique(), pl.col("request").is_unique()
        )
        failed += asked.height - answered.height
        unmatched += answered.height - matched["client"].n_unique()
        several += matched["client"].n_unique() - alone.height
        if alone.height:
            seen |= {one.name: alone.select(*KEY, *TIMES) for one in instances}
    warnings += _warnings(
        client_failed=(
            failed,
            "{:,} requests of clients were not answered in full",
            "They are in no figure of the clients; see their `error`",
        ),
        client_unmatched=(
            unmatched,
            "{:,} requests of clients are none that an engine recorded",
            "What they waited for outside the engine is not told; see whether "
            "step_timing_v2 is applied, and X-Request-Id is passed on",
        ),
        client_several=(
            several,
            "{:,} requests of clients may each be several that an engine recorded",
            "They are left out; give each request an id of its own",
        ),
    )
    return Clients(seen, warnings)


def on_the_way_us(span: str) -> pl.Expr:
    """What the client waited for outside the server, or before its tokens were sent."""
    inside = pl.col("before_engine_us") + pl.col(f"{span}_us")
    return pl.col(f"client_{span}_us") - inside


def outside(requests: pl.DataFrame) -> list[list]:
    """Rows of what clients waited for: its name; p50, p90 and p99 in ms.

    Over the requests of which a client told; none if there are none.
    """
    if TIMES[0] not in requests.columns:
        return []
    known = requests.drop_nulls(TIMES)
    rows = []
    for span, whole in SPANS.items() if known.height else ():
        parts = {
            whole: pl.col(f"client_{span}_us"),
            "of it before the engine": pl.col("before_engine_us"),
            "of it in the engine": pl.col(f"{span}_us"),
            "of it on the way": on_the_way_us(span),
        }
        for name, us in parts.items():
            ms = known.select(us / 1e3).to_series()
            rows.append([name, *(ms.quantile(share) for share in SHARES)])
    return rows


def _groups(
    folder: Path, found: Sequence[Found]
) -> Iterator[tuple[list[Path], list[Found]]]:
    """Clients' files, and the instances that they tell of.

    An instance's are in the nearest folder above it that has some: a sweep has a
    driver for each server. Files above no instance tell of those that have none.
    """
    places: dict[Path, list[Path]] = {}
    for name in (DRIVER, REPLAYER):
        for path in (folder.resolve().parent / name, *sorted(folder.rglob(name))):
            if path.is_file():
                places.setdefault(path.resolve().parent, []).append(path)
    instances: dict[Path | None, list[Found]] = {None: []}
    for one in found:
        above = (place for place in one.path.resolve().parents if place in places)
        instances.setdefault(next(above, None), []).append(one)
    others = [
        path for place in places if place not in instances for path in places[place]
    ]
    for place, told in instances.items():
        if files := others if place is None else places[place]:
            yield files, told


def _read(files: Sequence[Path]) -> tuple[pl.DataFrame, list[RunWarning]]:
    """A row per request of these clients, and what is wrong with the files."""
    rows, warnings = [], []
    for path in files:
        try:
            told, torn_lines = _outcomes(path)
        except RecordsError as error:
            remedy = "What this client saw is left out; see the file"
            warnings.append(RunWarning("client_unreadable", str(error), remedy))
            continue
        rows += told
        warnings += _warnings(
            torn_lines=(
                torn_lines,
                f"{path.name}: torn last line left out",
                "Nothing: a stopped writer leaves one",
            )
        )
    table = pl.DataFrame(rows, ASKED, orient="row", strict=False)
    return table.with_row_index("client"), warnings


def _outcomes(path: Path) -> tuple[list[tuple], int]:
    """The rows of a file, as ASKED has them, and how many torn lines it had."""
    if path.name == DRIVER:
        driven = read_requests(path)
        return [
            _row(str(one.id), one.prompt_tokens, one.output_tokens, one)
            for one in driven.requests
        ], driven.torn_lines
    replayed = read_lines(path, ReplayHeader, ReplayedRequest | ReplayEnd)
    if replayed.header is None:
        raise RecordsError(f"{path}:1: no header line")
    return [
        _row(
            in_header(one.id),
            one.usage_prompt_tokens,
            one.usage_completion_tokens,
            one,
        )
        for one in replayed.records
        if isinstance(one, ReplayedRequest)
    ], replayed.torn_lines


def _row(
    name: str, prompt_tokens: int | None, output_tokens: int | None, outcome: Outcome
) -> tuple:
    moments = (outcome.sent_ns, outcome.first_token_ns, outcome.end_ns)
    if outcome.status != "ok" or None in moments:
        return (*ids_of_completion(name), None, None, None, None)
    sent_ns, first_ns, end_ns = moments
    ttft_us, e2e_us = (first_ns - sent_ns) / 1e3, (end_ns - sent_ns) / 1e3
    return (*ids_of_completion(name), prompt_tokens, output_tokens, ttft_us, e2e_us)


def _matched(answered: pl.DataFrame, folders: set[Path]) -> pl.DataFrame:
    """A row per pair of a client's request and one that an engine recorded."""
    recorded = pl.concat([pl.DataFrame(schema=KEY), *map(_recorded, sorted(folders))])
    # An engine's header says which of the two its ids are.
    asked = answered.unpivot(
        NAMES, index=["client", *TOKENS, *TIMES], value_name="id"
    ).drop("variable")
    return recorded.with_row_index("request").join(asked, on=["id", *TOKENS])


def _recorded(folder: Path) -> pl.DataFrame:
    """KEY of the requests that ended; none where look.requests tells what is wrong."""
    rows = []
    with suppress(RecordsError):
        records = read_engine_requests(folder / FILE).records
        rows = [
            (one.id, one.prompt_tokens, one.output_tokens)
            for one in records
            if one.finished_ns is not None
        ]
    return pl.DataFrame(rows, KEY, orient="row", strict=False)


def _warnings(**told: tuple[int, str, str]) -> list[RunWarning]:
    """By kind: how many there are, what of it is told, and what to do."""
    return [
        RunWarning(kind, message.format(count), remedy)
        for kind, (count, message, remedy) in told.items()
        if count
    ]
