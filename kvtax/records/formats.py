# SPDX-License-Identifier: Apache-2.0
"""Every file format of the core, in the order of a run, and its fields, described."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from kvtax.records import (
    observatory_cell,
    per_config,
    requests,
    run,
    steps,
)
from kvtax.records.steps import Unit


class Format(NamedTuple):
    """A kind of file: name, purpose, and the structs of its document or its lines."""

    name: str
    purpose: str
    kinds: tuple[type[msgspec.Struct], ...]


FORMATS = (
    Format(
        "run.json", "What was planned, where, with which versions.", (run.RunRecord,)
    ),
    Format("trial.json", "How a trial, one server lifetime, went.", (run.TrialRecord,)),
    Format(
        "engine_step.jsonl",
        "A line per engine step, written in the engine core by the recorder.",
        (steps.EngineHeader, steps.EngineStep),
    ),
    Format(
        "worker_step.r*.jsonl",
        "A line per step and rank, written in each worker; joins on `step_id`. Of "
        "several ranks the slowest counts: the others wait for it.",
        (steps.WorkerHeader, steps.WorkerStep),
    ),
    Format(
        "threads.jsonl",
        "CPU time of the engine process by thread, four times a second while it steps.",
        (steps.ThreadsHeader, steps.ThreadTimes),
    ),
    Format(
        "engine_request.jsonl",
        "A line per request when it ended, written in the engine core.",
        (requests.EngineRequestHeader, requests.EngineRequest),
    ),
    Format(
        "device_step.jsonl",
        "When each forward of a null device ran beside the host.",
        (steps.DeviceHeader, steps.DeviceStep),
    ),
    Format(
        "requests.jsonl",
        "A line per request, phase and end, written by the driver. A trial fails if "
        "they do not add up: scheduled = ok + failed + cancelled.",
        (
            requests.RequestsHeader,
            requests.PhaseStart,
            requests.RequestRecord,
            requests.DriverEnd,
        ),
    ),
    Format(
        "reads.jsonl",
        "A line per turn of the peer that reads from the server.",
        (run.ReadsHeader, run.ReadRecord),
    ),
    Format(
        "replay.jsonl",
        "A line per request of a replayed trace, in the order in which they ended.",
        (requests.ReplayHeader, requests.ReplayedRequest, requests.ReplayEnd),
    ),
    Format(
        "per_config.json",
        "The results of a sweep. A field is null if it was not measured.",
        (per_config.PerConfig,),
    ),
    Format(
        "evidence.json",
        "What a sweep measured, a row for each hold; its results are made from it.",
        (per_config.Evidence,),
    ),
    Format(
        "observatory/*.jsonl.xz",
        "The observatory's cells of a release, a line per connector.",
        (observatory_cell.CellRecord,),
    ),
)


def descriptions(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Read the description of each field of `kind`, inherited ones included."""
    texts: dict[str, str] = {}
    for base in kind.__mro__[: kind.__mro__.index(msgspec.Struct)]:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, after in itertools.pairwise(definition.body):
            match field, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts.setdefault(name, " ".join(text.split()))
    return texts


def table(kind: type[msgspec.Struct]) -> str:
    """Make a row per field of `kind`. Raises KeyError if a field has no description."""
    texts = descriptions(kind)
    hints = get_type_hints(kind, include_extras=True)
    measured = {
        name: notes[0]
        for name, hint in hints.items()
        if (notes := [n for n in get_args(hint)[1:] if isinstance(n, Unit)])
    }
    lines = ["| field | meaning |", "|---|---|"]
    if measured:
        lines = ["| field | unit | meaning |", "|---|---|---|"]
    for field, written in zip(
        kind.__struct_fields__, kind.__struct_encode_fields__, strict=True
    ):
        facts = f" {measured[field].name} |" if measured else ""
        text = texts[field].replace("|cache|", r"\|cache\|")
        lines.append(f"| `{written}` |{facts} {text} |")
    return "\n".join([*lines, ""])


def described(form: Format) -> str:
    """Render a format as Markdown: a table per struct, those inside of others last.

    Raises KeyError if a field has no description.
    """
    sections = [f"# {form.name}{_schema(form)}\n\n{form.purpose}\n"]
    sections += [
        f"## {kind.__name__}\n\n{inspect.getdoc(kind)}\n\n{table(kind)}"
        for kind in _with_inner(form.kinds)
    ]
    return "\n".join(sections)


def _schema(form: Format) -> str:
    """Return the schema that the file's first field names."""
    config = form.kinds[0].__struct_config__
    return f", schema {config.tag}" if config.tag_field == "schema" else ""


def _with_inner(kinds: tuple[type[msgspec.Struct], ...]) -> list[type[msgspec.Struct]]:
    """List `kinds` and the structs that their fields hold, each once."""
    every = list(kinds)
    for kind in every:
        for hint in get_type_hints(kind, include_extras=True).values():
            every += [inner for inner in _structs(hint) if inner not in every]
    return every


def _structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs that a type hint names, at any depth."""
    if inspect.isclass(hint) and issubclass(hint, msgspec.Struct):
        yield hint
    for inner in get_args(hint):
        yield from _structs(inner)
