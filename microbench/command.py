# SPDX-License-Identifier: Apache-2.0
"""Measure what each KV connector costs per engine step, and report (the main job).

Writes a run folder, runs/NAME or --out, and in it SUMMARY.md, report.html,
per_config.json and figures/. These go to the repository, with the pages that quote
them, if the whole default profile was measured and --out is not given. Exit code 1: a
limit is broken, or a config of known cost got another verdict. Exit code 3: a server
failed, or this machine cannot measure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvtax.cli.options import add_connector_config, add_ray, add_vllm, cluster_of

if TYPE_CHECKING:
    from kvtax.engine.installation import Installation
    from kvtax.verdict.analysis import Analysis
    from microbench.profile import Profile
    from microbench.sweep import Rounds


# The profile whose results stand in the repository.
DEFAULT = "cpu"


class SweepError(Exception):
    """The options do not go together; the message says which."""

    exit_code = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax sweep`."""
    parser.allow_abbrev = False  # run_all.sh reads --profile, too.
    parser.add_argument(
        "--profile",
        default=DEFAULT,
        metavar="NAME",
        help=f"a file of configs/profiles/ (default: {DEFAULT})",
    )
    parser.add_argument(
        "--only", action="append", metavar="CONFIG", help="measure this (repeatable)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="servers per config (default: the profile's)",
    )
    parser.add_argument("--model", metavar="PATH", help="real weights (gpu profile)")
    own = parser.add_argument_group("a connector of your own")
    own.add_argument(
        "--connector",
        metavar="MODULE:CLASS",
        help="measure it along all axes (a minute), then beside plain vLLM and a no-op",
    )
    add_connector_config(own)
    own.add_argument("--limits", type=Path, metavar="FILE", help="limits to check")
    add_vllm(
        parser.add_argument_group("vLLM"),
        python="measure the vLLM of this Python, and leave it as it is",
        vllm="measure this release, in a new environment (up to 9 GB)",
    )
    _add_run(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="run folder (default: one in runs/)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the finished trials of --out"
    )
    parser.add_argument(
        "--profile-cpu",
        action="store_true",
        help="then sample one more server of each config: where its CPU time goes",
    )
    add_ray(parser, "measure on all hosts")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--check",
        action="store_true",
        help="only list what would stop the run: exit code 0 if nothing would, else 3",
    )
    instead.add_argument(
        "--report",
        type=Path,
        metavar="RUN",
        help="only analyse this run folder, or its evidence.json.gz, again",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check, report or measure. Raises errors with an exit code."""
    from kvtax.cli import Exit
    from kvtax.proc.machine_lock import machine_lock

    if arguments.report:
        run = arguments.report
        beside = run.parent if run.is_file() else run
        _print_verdicts(_report(run, arguments.out or beside))
        return Exit.GOOD
    if arguments.limits:
        from kvtax.verdict.limits import read_limits

        read_limits(arguments.limits)  # wrong ones are refused before the run
    profile, installed = _profile(arguments), _installed(arguments)
    if not arguments.check and not arguments.ray:
        # Before checks that take half a minute; it is held from the first server on.
        with machine_lock():
            print("sweep: checking vLLM, patches and this machine ...", flush=True)
    if arguments.check:
        from microbench.machine_fit import check

        return Exit.GOOD if check(profile, installed) else Exit.NOT_MEASURED
    gate_is_worse = _gate_is_worse(arguments, profile)
    status = _measure(arguments, profile, installed)
    return Exit.WORSE if gate_is_worse else status


def _gate_is_worse(arguments: argparse.Namespace, profile: Profile) -> bool:
    """Measure --connector along all axes; return whether a limit is broken.

    Axes need vLLM for CPUs, so a GPU profile has the sweep alone.
    """
    if not arguments.connector or profile.flavour != "cpu":
        return False
    from kvtax.axes.gate import GateOptions, NotMeasured, gate, markdown
    from kvtax.verdict.limits import read_limits

    options = GateOptions(
        connector=arguments.connector,
        connector_config=arguments.connector_config,
        python=arguments.python,
        vllm=arguments.vllm,
        limits=arguments.limits,
    )
    try:
        result = gate(options)
    except NotMeasured as error:
        if arguments.limits and read_limits(arguments.limits).axes:
            raise
        # The axes need 131,072 tokens of context in one process; servers may not.
        print(f"sweep: {error}\nsweep: only the sweep judges this connector")
        return False
    print(markdown(result))
    return result.worse


def _measure(
    arguments: argparse.Namespace, profile: Profile, installed: Installation
) -> int:
    """Measure and report; return the exit code."""
    from contextlib import nullcontext

    from kvtax import run_folder
    from kvtax.cli import Exit
    from kvtax.paths import REPOSITORY
    from kvtax.proc.machine_lock import machine_lock
    from kvtax.records.run import PLAN_FILE
    from microbench.machine_fit import choices, fitted
    from microbench.sweep import sweep

    profile = fitted(profile)
    for choice in choices(profile):
        print(f"sweep: {choice}")
    run_dir = run_folder.choose(
        arguments.out, arguments.profile, PLAN_FILE, arguments.resume
    )
    on_hosts = _on_hosts(arguments)
    # With --ray, each round takes the lock of its host.
    with nullcontext() if on_hosts else machine_lock():
        trials = sweep(
            run_dir,
            profile,
            installed,
            arguments.resume,
            arguments.profile_cpu,
            on_hosts,
        )
        is_reference = _is_reference(arguments)
        analysis = _report(run_dir, REPOSITORY if is_reference else run_dir)
    machine = analysis.document.machine
    if is_reference and not (machine and machine.refused):
        _write_figures_into_pages(REPOSITORY)
    is_worse = _is_worse(analysis, arguments.limits)
    _print_verdicts(analysis)
    if is_worse:
        return Exit.WORSE
    failed = any(trial.status != "ok" for trial in trials)
    return Exit.NOT_MEASURED if failed else Exit.GOOD


def _is_reference(arguments: argparse.Namespace) -> bool:
    """Return whether the whole default profile is measured on the locked vLLM."""
    changed = (
        *(arguments.out, arguments.only, arguments.repeats, arguments.model),
        *(arguments.connector, arguments.vllm),
    )
    is_locked = arguments.python == sys.executable
    return arguments.profile == DEFAULT and is_locked and not any(changed)


def _write_figures_into_pages(repository: Path) -> None:
    """Write the figures into the pages that quote them; a test compares the two."""
    written = subprocess.run([sys.executable, "-m", "tools.figures"], cwd=repository)
    if written.returncode:
        print("sweep: the pages keep their figures: see above", file=sys.stderr)


def _print_verdicts(analysis: Analysis) -> None:
    from microbench.summary.page import verdict_lines

    print(f"\n{verdict_lines(analysis.document)}")


def _report(run_dir: Path, out: Path) -> Analysis:
    from microbench.report import report

    analysis = report(run_dir, out)
    print(f"sweep: {out / 'SUMMARY.md'}; open {out / 'report.html'}")
    return analysis


def _is_worse(analysis: Analysis, limits: Path | None) -> bool:
    """Print unexpected verdicts and all limits; return whether one is broken."""
    from kvtax.verdict.changes import compare_sweeps
    from kvtax.verdict.comparison import markdown
    from kvtax.verdict.limits import read_limits
    from kvtax.verdict.roles import outcomes

    unexpected = [
        outcome
        for outcome in outcomes(analysis.document, analysis.roles)
        if outcome.kind != "right"
    ]
    for outcome in unexpected:
        print(f"sweep: {outcome}")
    if limits is None:
        return bool(unexpected)
    document = analysis.document
    comparison = compare_sweeps(document, document, read_limits(limits))
    print(markdown(comparison))
    return bool(unexpected) or any(check.fails for check in comparison.checks)


def _on_hosts(arguments: argparse.Namespace) -> Rounds | None:
    """Return the function that measures rounds on a cluster, None without --ray.

    Raises SweepError.
    """
    if (cluster := cluster_of(arguments)) is None:
        return None
    if arguments.profile_cpu:
        raise SweepError("--profile-cpu samples on this machine: leave out --ray")
    from functools import partial

    from microbench.on_hosts import run_on_hosts

    python = None if arguments.python == sys.executable else arguments.python
    return partial(run_on_hosts, cluster, python, arguments.vllm)


def _installed(arguments: argparse.Namespace) -> Installation:
    """Return the vLLM to measure. Raises ServerError and SweepError."""
    from kvtax.engine.installation import installation
    from kvtax.engine.releases import release
    from microbench.profile import load_profile

    if arguments.vllm is None:
        return installation(arguments.python)
    if load_profile(arguments.profile).flavour != "cpu":
        raise SweepError("--vllm installs vLLM for CPUs; for GPUs, use --python")
    return release(arguments.vllm)


def _profile(arguments: argparse.Namespace) -> Profile:
    """Return the profile with the changes of the options."""
    import msgspec

    from kvtax.engine.connector import own_connector
    from microbench.profile import load_profile, measured_with

    profile = load_profile(arguments.profile)
    changes: dict[str, object] = {}
    if arguments.connector:
        name, connector = own_connector(arguments.connector, arguments.connector_config)
        changes["own"] = {name: connector}
        changes["configs"] = measured_with(name, profile.configs)
    elif arguments.connector_config:
        raise SweepError("--connector-config needs --connector")
    if arguments.only:
        changes["configs"] = arguments.only
    if arguments.repeats is not None:
        if arguments.repeats < 1:
            raise SweepError("--repeats must be at least 1")
        changes["repeats"] = changes["most_repeats"] = arguments.repeats
    if arguments.model:
        if profile.null_model:
            raise SweepError(f"profile {arguments.profile} has no use for --model")
        changes["model"] = arguments.model
    profile = msgspec.structs.replace(profile, **changes)
    profile.connectors()  # Raises ConfigError for an unknown config in --only.
    return profile
