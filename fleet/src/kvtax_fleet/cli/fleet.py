# SPDX-License-Identifier: Apache-2.0
"""Compare routing policies and connectors on a fleet of instances.

kvtax fleet EXPERIMENT.toml is short for kvtax fleet run EXPERIMENT.toml: each arm of
the experiment runs on a fresh fleet, then the report is written. The other actions do
one part of that work by itself.
"""

from __future__ import annotations

import argparse
from inspect import cleandoc
from pathlib import Path

from kvtax.cli import Exit, require_checkout
from kvtax.cli.options import add_ray, cluster_of, number, whole_number

from kvtax_fleet.cli.options import add_parameters, add_settings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `kvtax fleet`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, summary, add_arguments, action in (
        ("run", "run an experiment and compare its arms", _add_run, _run),
        ("launch", "start a fleet on this machine", _add_launch, _launch),
        ("replay", "send a trace to a server", _add_replay, _replay),
        ("analyze", "write the report of a run again", _add_analyze, _analyze),
        ("decide", "decide recorded snapshots by another policy", _add_decide, _decide),
        ("roofline", "a profile's forward by roofline", _add_roofline, _roofline),
    ):
        subparser = actions.add_parser(
            name,
            help=summary,
            description=cleandoc(action.__doc__ or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(subparser)
        subparser.set_defaults(action=action)


def run(arguments: argparse.Namespace) -> int:
    """Do the chosen action."""
    return int(arguments.action(arguments))


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "experiment",
        type=Path,
        metavar="EXPERIMENT.toml",
        help="arms, load and fleet: a file of fleet/configs/experiments/",
    )
    parser.add_argument(
        "--out", type=Path, help="run folder (default: a new one in runs/)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the finished runs of --out"
    )
    parser.add_argument(
        "--virtual",
        action="store_true",
        help="simulate time: no servers, minutes in place of hours",
    )
    add_ray(parser, "with --virtual: simulate on all hosts")


def _run(arguments: argparse.Namespace) -> int:
    """Run every arm of an experiment on a fresh fleet, in turn, then compare the arms.

    Exit codes: 0 all runs went well and can be compared, 2 the experiment cannot start,
    3 a run failed or a comparison is refused (the report says which, and why).
    """
    require_checkout("fleet run")
    from kvtax_fleet.experiment.executors import run_experiment

    out = run_experiment(
        arguments.experiment,
        out=arguments.out,
        resume=arguments.resume,
        virtual=arguments.virtual,
        ray=cluster_of(arguments),
    )
    return _write_report(out, out)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--instances",
        type=whole_number(1),
        default=4,
        metavar="N",
        help="default: 4",
    )
    parser.add_argument(
        "--roles",
        help="in place of --instances: both, prefill or decode for each instance, "
        "separated by commas",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        help="a file of fleet/configs/profiles/ (default: h20-30b-a3b)",
    )
    parser.add_argument(
        "--connector",
        metavar="NAME",
        help="a config of configs/connectors/ (default: plain)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of instances.json, logs and records (default: in runs/)",
    )


def _launch(arguments: argparse.Namespace) -> int:
    """Start a fleet of vLLM instances on this machine.

    The fleet runs until Ctrl-C or SIGTERM, and no process of it outlives the command.
    Exit codes: 2 the arguments or the machine do not fit; 3 an instance did not start,
    or died; 130 or 143 the fleet was stopped.
    """
    require_checkout("fleet launch")
    from kvtax_fleet.launch import launched

    return launched.run(arguments)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    from kvtax_fleet.replay.options import Options

    add_settings(parser, Options)
    parser.add_argument(
        "--out", required=True, type=Path, help="file of the records, a new one"
    )


def _replay(arguments: argparse.Namespace) -> int:
    """Send a trace to a server and record every request.

    Open loop across sessions, closed loop inside one. OPENAI_API_KEY is sent if set.
    Exit codes: 0 every request ok and sent in time; 2 arguments, trace and server do
    not fit together, or the records cannot be written; 3 a request failed or was
    cancelled, or p99 of the send lag is over its budget; 130 or 143 stopped, with the
    rest recorded as cancelled.
    """
    from kvtax_fleet.replay import replayer

    return replayer.run(arguments)


def _add_analyze(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="folder with the arms' folders"
    )
    parser.add_argument("--out", type=Path, help="where to write (default: RUN_DIR)")


def _analyze(arguments: argparse.Namespace) -> int:
    """Write report.md, report.html and analysis.json of a run.

    Reads files only: every folder below RUN_DIR that has an arm.json. Exit codes: 0; 2
    the run cannot be read, and nothing is written; 3 a run failed or a comparison is
    refused (the report says which, and why).
    """
    return _write_report(arguments.run_dir, arguments.out or arguments.run_dir)


def _write_report(run_dir: Path, out: Path) -> int:
    from kvtax_fleet.analyze.fleet_report import write_reports

    sound = write_reports(run_dir, out)
    print(f"wrote {out / 'report.md'}, {out / 'analysis.json'}")
    print(f"open {out / 'report.html'}")
    return Exit.GOOD if sound else Exit.NOT_MEASURED


def _add_decide(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("decisions", type=Path, metavar="FILE", help="decisions.jsonl of a proxy")
    add("--policy", metavar="NAME", help="default: the policy that decided")
    add_parameters(parser)


def _decide(arguments: argparse.Namespace) -> int:
    """Decide the recorded snapshots of a proxy again, and count the differences.

    This compares decisions, not outcomes: the later snapshots follow from the recorded
    decisions. Exit codes: 0; 1 the recorded policy decides otherwise than recorded; 2
    the file, the policy or its parameters are wrong.
    """
    from kvtax_fleet.policies import named_values
    from kvtax_fleet.policies.replay import decide_again

    given = named_values(arguments.parameters)
    comparison = decide_again(arguments.decisions, arguments.policy, given)
    print(comparison.text())
    return Exit.GOOD if comparison.reproduced else Exit.WORSE


def _add_roofline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="qwen3-coder-30b-a3b",
        help="a name in configs/models, or a config.json (default: %(default)s)",
    )
    parser.add_argument(
        "--gpu", default="h20", help="a name in configs/gpus.toml (default: h20)"
    )
    parser.add_argument(
        "--share",
        type=number(0.001),
        default=1.0,
        metavar="X",
        help="share of the GPU's peaks that a forward reaches (default: 1)",
    )


def _roofline(arguments: argparse.Namespace) -> int:
    """Print the table [forward] of a fleet profile, by FLOP and memory bandwidth."""
    from kvtax_fleet.analyze.roofline import forward_table

    print(forward_table(arguments.model, arguments.gpu, arguments.share))
    return Exit.GOOD
