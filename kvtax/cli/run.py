# SPDX-License-Identifier: Apache-2.0
"""Run a command with vLLM patched as it is imported; no installed file is touched.

    kvtax run --records /records -- vllm serve ...
    kvtax run --fix mooncake_get_finished_short_circuit -- vllm serve ...

The exit code is that of the command, which gets the signals that come here. Patches
that do not fit are refused before it starts, with exit code 2, and so is a command that
shuts them out (python -I) or does not show its Python (name it with --python). Where no
process imports a patched module, or with --fix one imports vLLM without the patches,
the exit code is 3.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvtax import patcher
from kvtax.cli import Exit
from kvtax.config import ConfigError
from kvtax.patcher import cli
from kvtax.paths import CONFIGS

RECORDS = "timing"  # the set of patches that record
# Of a command that could not be started, and of one that a signal ended.
SELF_EXPLAINED = {126, 127, Exit.INTERRUPTED, Exit.TERMINATED, 129, 137}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax run`."""
    parser.add_argument(
        "--records",
        type=Path,
        metavar="DIR",
        help="record each engine step in this folder, for kvtax look",
    )
    parser.add_argument(
        "--fix",
        action="extend",
        nargs="+",
        default=[],
        metavar="PATCH",
        help="apply these patches or sets (kvtax patch --list shows them)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=cli.assignment,
        metavar="NAME=VALUE",
        help="a parameter of a patch; VALUE is a Python literal",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="show what would be applied to which release, and run nothing",
    )
    parser.add_argument(
        "--python", help="the Python that has vLLM, where the command does not show it"
    )
    parser.add_argument(
        "command", nargs="+", metavar="-- COMMAND", help="such as vllm serve MODEL"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command, or check the patches; return the exit code."""
    try:
        plans = _plans(arguments)
    except (patcher.LockedError, patcher.ParameterError, patcher.UnfinishedError):
        raise
    except patcher.BlockPatchError as error:
        if not arguments.check:
            raise
        print(f"does not fit: {error}")
        return Exit.BAD_INPUT
    obstacles = _obstacles(arguments)
    if arguments.check:
        _report(plans)
    if obstacles:
        print(obstacles, file=sys.stderr)
        return Exit.BAD_INPUT
    if arguments.check:
        return Exit.GOOD
    for tree, patches, _ in plans:
        names = ", ".join(patch.name for patch in patches)
        cli.show(f"kvtax: {cli.title(tree)} gets {names}", file=sys.stderr)
    return _run_patched(arguments, plans)


def _run_patched(
    arguments: argparse.Namespace, plans: Sequence[patcher.ImportPlan]
) -> int:
    """Run the command with an overlay of the plans; return the exit code."""
    from kvtax.engine.import_watch import ImportWatch
    from kvtax.proc.foreground import Foreground, run_in_foreground
    from kvtax.proc.user_files import runtime_folder

    overlay = Path(tempfile.mkdtemp(prefix="kvtax-run-", dir=runtime_folder()))
    # Cleaners of temporary files spare a folder that is locked.
    held = os.open(overlay, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    patcher.write_overlay(overlay, plans)
    replaced = [
        tree.root / change.path
        for tree, _, plan in plans
        for change in plan.changes
        if change.old is not None
    ]
    watch = ImportWatch(overlay, replaced, is_strict=bool(arguments.fix))
    env = _environment(overlay, arguments.records)
    job = Foreground(arguments.command, env, overlay, watch)
    return run_in_foreground(job, lambda code: _check_imports(overlay, code))


def _check_imports(overlay: Path, code: int) -> int:
    """Print which patched modules no process imported; return the exit code."""
    if code in SELF_EXPLAINED:
        return code
    from kvtax.engine.import_watch import UNPATCHED

    try:
        never, is_all = patcher.never_imported(overlay)
    except FileNotFoundError:
        print(
            f"kvtax: {overlay} was removed while the command ran: what it started "
            "since then was not patched",
            file=sys.stderr,
        )
        return code or Exit.NOT_MEASURED
    if never:
        print(f"kvtax: never imported: {', '.join(never)}", file=sys.stderr)
    if not is_all:
        is_partial = (overlay / UNPATCHED).exists()
        return code or (Exit.NOT_MEASURED if is_partial else Exit.GOOD)
    print(
        "kvtax: so nothing was patched: the command imports none of these, or starts "
        "Python elsewhere or with another environment",
        file=sys.stderr,
    )
    return code or Exit.NOT_MEASURED


def _plans(arguments: argparse.Namespace) -> list[patcher.ImportPlan]:
    """Plan the patches for the packages that the command would import."""
    from kvtax.engine.command_python import UnknownPython, python_of
    from kvtax.engine.overlay import named_patches

    names = [*arguments.fix, *([RECORDS] if arguments.records else [])]
    if not names:
        raise ConfigError("nothing to apply: give --records DIR or --fix PATCH")
    try:
        used = python_of(arguments.command, arguments.python)
    except UnknownPython as error:
        line = _line(arguments, arguments.command, arguments.fix, "PATH")
        raise UnknownPython(
            f"{error}; name the interpreter that has vLLM: {line}"
        ) from None
    return patcher.plan_imports(
        named_patches(names),
        dict(arguments.set),
        lambda package: patcher.Tree(used.package(package), only_read=True),
    )


def _obstacles(arguments: argparse.Namespace) -> str:
    """Name what would stop a server on the CPU, and the command that works."""
    from kvtax.engine.command_python import python_of
    from kvtax.engine.cpu_obstacles import obstacles_to

    used = python_of(arguments.command, arguments.python)
    obstacles = obstacles_to(arguments.command, used, arguments.fix)
    if not obstacles.reasons:
        return ""
    reasons = "".join(f"\n  {reason}" for reason in obstacles.reasons)
    line = _line(arguments, obstacles.command, obstacles.fixes, arguments.python)
    return f"kvtax: vLLM would not start:{reasons}\nthis works: {line}"


def _line(
    arguments: argparse.Namespace,
    command: Sequence[str],
    fixes: Sequence[str],
    python: str | None,
) -> str:
    """Write the line to type for another command, fixes or Python."""
    words = ["kvtax", "run"]
    if python:
        words += ["--python", python]
    if arguments.records:
        words += ["--records", str(arguments.records)]
    if fixes:
        words += ["--fix", *fixes]
    for name, value in arguments.set:
        words += ["--set", f"{name}={value!r}"]
    return shlex.join([*words, "--", *command])


def _environment(overlay: Path, records: Path | None) -> dict[str, str]:
    behind = os.environ.get("PYTHONPATH", "")
    env = os.environ | {"PYTHONPATH": patcher.python_path(overlay, behind)}
    if records:
        records.mkdir(mode=0o700, parents=True, exist_ok=True)
        env["KVTAX_STEP_RECORDS_DIR"] = str(records.absolute())
    return env


def _report(plans: Sequence[patcher.ImportPlan]) -> None:
    releases = patcher.load_releases(CONFIGS / "releases.toml")
    for tree, patches, plan in plans:
        cli.report(tree, plan, "check")
        cli.report_fit(tree, patches, plan, releases)
