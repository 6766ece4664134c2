# SPDX-License-Identifier: Apache-2.0
"""The main job: measure every config of a profile, then report.

Each config gets a private tree with its patches, and each repeat of it a fresh
server. Repeats run the configs forwards and backwards in turn, so that a machine
that warms up or slows down does so for all of them alike.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import socket
import sys
from pathlib import Path

import msgspec

from lab.config import ConfigError
from lab.paths import REPOSITORY
from lab.records import RecordsError
from lab.serving import preflight, provenance
from lab.serving.connector import Connector, load_connector
from lab.serving.null_model import write_model
from lab.serving.preflight import PreflightError
from lab.serving.supervise import exit_on_signals
from lab.serving.tree import build_tree, installed_package, link_package
from microbench import report
from microbench.profile import Profile, load_profile
from microbench.progress import Progress
from microbench.trial import Bench, Trial, run_trial, write_trial


class SweepError(Exception):
    """The sweep cannot start; the message says what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="run_all.sh", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--profile",
        default="cpu",
        metavar="NAME",
        help="a file of configs/profiles/ (default: cpu; gpu has not been run yet)",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="CONFIG",
        help="measure just this config (repeatable)",
    )
    parser.add_argument("--repeats", type=int, help="servers a config (default: 2)")
    parser.add_argument("--model", help="path of real weights (gpu profile)")
    parser.add_argument("--out", type=Path, help="run folder (default: a new one)")
    parser.add_argument(
        "--resume", action="store_true", help="keep the finished trials of --out"
    )
    parser.add_argument(
        "--py-spy", action="store_true", help="record a profile of each engine"
    )
    arguments = parser.parse_args()
    exit_on_signals()
    try:
        lock = _lock_machine()
        profile = _profile(arguments)
        # Without --out the result is the repository's own.
        result_dir = arguments.out or REPOSITORY
        run_dir = _run_dir(arguments)
        trials = sweep(run_dir, profile, arguments.resume, arguments.py_spy)
        report.report(run_dir, result_dir)
        lock.close()
    except (SweepError, ConfigError, PreflightError, RecordsError) as error:
        print(f"run_all: {error}", file=sys.stderr)
        return 1
    print(f"run_all: {result_dir / 'SUMMARY.md'}")
    return 0 if all(trial.status == "ok" for trial in trials) else 1


def sweep(run_dir: Path, profile: Profile, resume: bool, py_spy: bool) -> list[Trial]:
    """Run all trials of `profile` into `run_dir`, whose trees are gone afterwards.

    Raises SweepError if `run_dir` holds another run.
    """
    connectors = {name: load_connector(name) for name in profile.configs}
    preflight.check_machine(profile)
    trees = run_dir / "trees"
    # Left by a sweep that was killed.
    shutil.rmtree(trees, ignore_errors=True)
    try:
        base = trees / "base"
        link_package(installed_package("vllm"), base)
        preflight.check_import(base, profile)
        bench = Bench(profile, *write_model(run_dir / "model", profile), py_spy)
        patches, errors = _build_trees(trees, connectors)
        plan = _plan(profile, connectors, patches)
        _write_run(run_dir, profile, connectors, patches, plan, resume)
        with Progress(plan) as progress:
            for index, trial in enumerate(plan):
                name, folder = trial.config, run_dir / trial.config / f"r{trial.repeat}"
                progress.begin(index)
                if resume and (done := _finished(folder, trial)):
                    trial = done
                elif name in errors:
                    trial.status, trial.error = "failed", errors[name]
                    write_trial(folder, trial)
                else:
                    run_trial(folder, trial, trees / name, connectors[name], bench)
                progress.end(index, trial)
        return plan
    finally:
        shutil.rmtree(trees, ignore_errors=True)


def _plan(
    profile: Profile,
    connectors: dict[str, Connector],
    patches: dict[str, dict[str, str]],
) -> list[Trial]:
    """All trials in the order in which they run."""
    return [
        Trial(
            config=name,
            repeat=repeat,
            connector_config=connectors[name].kv_transfer_config,
            patches=patches.get(name, {}),
            num_blocks=profile.num_blocks,
            block_size=profile.block_size,
        )
        for repeat in range(profile.repeats)
        for name in _order(profile.configs, repeat)
    ]


def _order(configs: list[str], repeat: int) -> list[str]:
    return configs if repeat % 2 == 0 else configs[::-1]


def _build_trees(
    trees: Path, connectors: dict[str, Connector]
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """A tree per config: the patch hashes of those that fit, the error of the rest."""
    patches, errors = {}, {}
    for name, connector in connectors.items():
        try:
            preflight.check_connector(connector)
            patches[name] = build_tree(
                trees / name,
                trees / "base" / "vllm",
                connector.patches,
                connector.patch_parameters,
            )
        except preflight.CONFIG_ERRORS as error:
            errors[name] = f"preflight: {error}"
    return patches, errors


def _finished(folder: Path, planned: Trial) -> Trial | None:
    """The trial that an earlier sweep finished in `folder`, if it is the same."""
    try:
        done = msgspec.json.decode((folder / "trial.json").read_bytes(), type=Trial)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return done if done.status == "ok" and done.patches == planned.patches else None


def _write_run(
    run_dir: Path,
    profile: Profile,
    connectors: dict[str, Connector],
    patches: dict[str, dict[str, str]],
    plan: list[Trial],
    resume: bool,
) -> None:
    file = run_dir / "run.json"
    hashes = {name: sha for used in patches.values() for name, sha in used.items()}
    record = {
        "schema": "kvtax.run/1",
        "profile": msgspec.to_builtins(profile),
        "provenance": provenance.collect(hashes),
        "configs": {n: msgspec.to_builtins(c.report) for n, c in connectors.items()},
        "plan": [{"config": t.config, "repeat": t.repeat} for t in plan],
    }
    if resume:
        earlier = json.loads(file.read_text())
        for key, now in (
            ("profile", record["profile"]),
            ("plan", record["plan"]),
        ):
            if earlier[key] != now:
                raise SweepError(f"cannot resume {run_dir}: its {key} is another")
        changed = {"patch_hashes", "package_versions", "host", "git_commit"}
        for key in sorted(changed):
            if earlier["provenance"][key] != record["provenance"][key]:
                raise SweepError(
                    f"cannot resume {run_dir}: {key} has changed since, and a run "
                    "must not mix the two"
                )
        return
    file.write_text(json.dumps(record, indent=1) + "\n")


def _profile(arguments: argparse.Namespace) -> Profile:
    profile = load_profile(arguments.profile)
    if unknown := set(arguments.only or ()) - set(profile.configs):
        # A config outside the profile may be asked for, if it exists.
        for name in unknown:
            load_connector(name)
    changes = {}
    if arguments.only:
        changes["configs"] = arguments.only
    if arguments.repeats is not None:
        if arguments.repeats < 1:
            raise SweepError("--repeats must be at least 1")
        changes["repeats"] = arguments.repeats
    if arguments.model:
        if profile.null_model:
            raise SweepError(f"profile {arguments.profile} has no use for --model")
        changes["model"] = arguments.model
    return msgspec.structs.replace(profile, **changes)


def _run_dir(arguments: argparse.Namespace) -> Path:
    if arguments.resume and not (
        arguments.out and (arguments.out / "run.json").exists()
    ):
        raise SweepError("--resume needs --out and the folder of a run to resume")
    if arguments.out is None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        arguments.out = REPOSITORY / "runs" / f"{now}-{arguments.profile}"
    if (arguments.out / "run.json").exists() and not arguments.resume:
        raise SweepError(
            f"{arguments.out} holds a run already: add --resume, or another --out"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments.out.resolve()


def _lock_machine() -> socket.socket:
    """Hold a name that vanishes with us: two sweeps would measure each other."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind("\0kvtax-sweep")
    except OSError:
        raise SweepError(
            "another sweep is running on this machine; two would disturb each other"
        ) from None
    return lock


if __name__ == "__main__":
    sys.exit(main())
