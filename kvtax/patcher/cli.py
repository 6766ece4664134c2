# SPDX-License-Identifier: Apache-2.0
"""Arguments and actions of `kvtax patch` and of apply_step_timing_v2.py."""

import argparse
import ast
import io
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from . import engine
from .errors import (
    BlockPatchError,
    LockedError,
    ManifestError,
    ParameterError,
    TargetError,
    UnfinishedError,
)
from .journal import pending, settle
from .manifest import in_sets, load_patches, load_sets, select
from .patch import Patch, Release, load_releases
from .plan import Plan
from .target import Tree, find_package, locate

DEFAULT_SET = "timing"
LEFT, REFUSED, CLOSED_PIPE = 1, 2, 141  # exit codes
EVERYTHING = "all"  # to --revert: also patches that no set names
_EPILOG = """\
exit codes: 0 done, or nothing to do; 1 --revert without --patch has left other patches
in the tree, and names them; 2 refused, the tree as it was. Ctrl-C and SIGTERM wait for
the whole change. After a kill, the next --apply or --revert undoes the change, or
gives it up if somebody has changed the files since. Other actions never write.
"""


def main(
    description: str | None, repository: Path, argv: Sequence[str] | None = None
) -> int:
    """Run the command line of apply_step_timing_v2.py and return the exit code."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    configure(parser)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale without a character must not end a run when it is told.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = run(parser.parse_args(argv), repository)
        sys.stdout.flush()
    except BlockPatchError as error:
        show(f"refused: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader left early; the action is done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    return code


def show(text: str, file: TextIO | None = None) -> None:
    """Print a text without signs that a terminal would obey."""
    shown = (sign if sign.isprintable() or sign in "\n\t" else "?" for sign in text)
    print("".join(shown), file=file)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: one action, some patches, one target."""
    parser.epilog = _EPILOG
    action = parser.add_mutually_exclusive_group(required=True)
    for name, text in {
        "apply": "apply the patches; those applied already are brought up to date",
        "revert": "take the patches out again, to the identical bytes, and list them",
        "status": "show for every patch whether the tree has it, or would take it",
        "check": "show whether the patches would apply; change nothing",
        "diff": "print what the patches change, against the tree without them",
        "list": "list the patches and the releases they are tested on",
    }.items():
        action.add_argument(
            f"--{name}", dest="action", action="store_const", const=name, help=text
        )
    parser.add_argument(
        "--patch",
        action="append",
        metavar="NAME",
        help="a patch, or a set of patches/sets.toml such as all; may be repeated; "
        f"status shows all without it (default: {DEFAULT_SET})",
    )
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="the package directory, a directory that contains it, or a source tree "
        "(default: what this Python would import, else the repository's .venv)",
    )
    parser.add_argument(
        "--discard-edits",
        action="store_true",
        help="with --revert: take out blocks that somebody edited, too; a copy of the "
        "file stays as FILE.edited",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=assignment,
        metavar="NAME=VALUE",
        help="a parameter of a patch; VALUE is a Python literal",
    )


def run(args: argparse.Namespace, repository: Path) -> int:
    """Run one action and return the exit code. Raises BlockPatchError.

    `repository` holds patches/ and configs/releases.toml, and maybe a .venv.
    """
    folder = repository / "patches"
    if args.set and args.action not in ("apply", "check", "diff"):
        raise ParameterError("--set goes with --apply, --check or --diff")
    if args.discard_edits and args.action != "revert":
        raise ParameterError("--discard-edits goes with --revert")
    sets = load_sets(folder)
    if args.action == "list":
        _list(load_patches(folder), sets, _releases(repository))
        return 0
    if args.action == "status":
        return _status(load_patches(folder), sets, args, repository)
    names = _names(args, sets, folder)
    if args.action == "revert":
        return _revert(names, _manifests_if_sound(folder), args, repository)
    code = _put(select(load_patches(folder), names), args, repository)
    if not args.patch and not code and args.action != "diff":
        others = ", ".join(name for name in sets if name != DEFAULT_SET) or "none"
        show(f"set {DEFAULT_SET}; --patch takes other sets, too: {others}")
    return code


def assignment(text: str) -> tuple[str, Any]:
    """Read a parameter, NAME=VALUE. Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    try:
        if not (name and equals):
            raise ValueError
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE with a Python literal (strings in quotes)"
        ) from None


def _releases(repository: Path) -> Mapping[str, list[Release]]:
    return load_releases(repository / "configs" / "releases.toml")


def _names(
    args: argparse.Namespace, sets: dict[str, list[str]], folder: Path
) -> list[str]:
    if not args.patch and DEFAULT_SET not in sets:
        raise ManifestError(
            f"{folder / 'sets.toml'} has no set {DEFAULT_SET!r}; name a --patch"
        )
    return in_sets(args.patch or [DEFAULT_SET], sets)


def _manifests_if_sound(folder: Path) -> dict[str, Patch]:
    """Load the manifests, {} if one is broken: to revert, they only name packages."""
    try:
        return load_patches(folder)
    except ManifestError:
        return {}


def _tree(package: str, target: Path | None, repository: Path) -> Tree:
    if target is not None:
        return locate(package, target)
    fallbacks = repository.glob(".venv/lib/python3*/site-packages")
    return Tree(find_package(package, fallbacks))


def _trees(
    packages: Iterable[str], target: Path | None, repository: Path
) -> list[Tree]:
    """Find the trees of those packages that exist, the one with most patches first.

    `packages` has one for each patch. Raises TargetError if none exists.
    """
    names = [name for name, _ in Counter(packages).most_common()]
    if target is not None and (target / "__init__.py").is_file():
        names = [target.absolute().name]
    trees, misses = [], []
    for name in names:
        try:
            trees.append(_tree(name, target, repository))
        except TargetError as error:
            misses.append(error)
    if not trees:
        raise misses[0] if misses else TargetError("name the tree with --target")
    return trees


def title(tree: Tree) -> str:
    """Name a tree by package, version and place."""
    return f"{tree.title} in {tree.root}"


def _put(patches: list[Patch], args: argparse.Namespace, repository: Path) -> int:
    """Apply, check or diff. Every tree is checked before the first is changed."""
    jobs = engine.split_by_package(
        patches,
        dict(args.set),
        lambda package: _tree(package, args.target, repository),
    )
    if args.action == "apply":
        for tree, _, _ in jobs:
            settle(tree)
    try:
        plans = [engine.check(*job) for job in jobs]
    except (LockedError, UnfinishedError):
        raise
    except BlockPatchError as error:
        if args.action != "check":
            raise
        show(f"does not fit: {error}")
        return REFUSED
    if args.action == "apply":
        plans = [engine.apply(*job) for job in jobs]
    for (tree, mine, _), plan in zip(jobs, plans, strict=True):
        if args.action == "diff":
            print(plan.diff(), end="")
            continue
        report(tree, plan, args.action)
        if args.action == "check":
            report_fit(tree, mine, plan, _releases(repository))
    return 0


def report(tree: Tree, plan: Plan, action: str) -> None:
    """Print what `action` did to the tree, or would do to it (`check`)."""
    show(title(tree))
    if plan.removed:
        show(f"  reverted: {', '.join(plan.removed)}")
    for change in plan.changes:
        would = "would be " if action == "check" else ""
        show(f"  {would}{change.kind}: {change.path}")
    if not plan.changes:
        state = "not applied" if action == "revert" else "already applied"
        show(f"  nothing to do, {state}")
    if plan.note:
        show(f"  {plan.note}")
    if plan.left:
        left = ", ".join(plan.left)
        show(
            f"  still in the tree: {left} (--revert --patch {EVERYTHING} takes all out)"
        )


def report_fit(
    tree: Tree,
    patches: list[Patch],
    plan: Plan,
    releases: Mapping[str, list[Release]],
) -> None:
    """Print for each of the planned patches whether that is tested on the tree."""
    present = _applied(engine.status(tree)) | {patch.name for patch in patches}
    for patch in patches:
        tested = patch.tested(releases)
        if tree.version and tree.version.partition("+")[0] in tested:
            show(f"  {patch.name}: fits; {tree.version} is a tested release")
        else:
            show(
                f"  {patch.name}: fits, but is not tested on this release "
                f"({', '.join(tested) or 'none'} are)"
            )
        if left := dict.fromkeys(plan.unfit.get(patch.name, ())):
            show(f"    left out, for other code than this: {', '.join(left)}")
        _report_relations(patch, present)


def _report_relations(patch: Patch, present: set[str]) -> None:
    for kind, other, why in patch.relations:
        there = "there" if other in present else "not there"
        show(f"    {kind} {other} ({there}): {why}")


def _applied(statuses: Mapping[str, engine.PatchStatus]) -> set[str]:
    return {name for name, status in statuses.items() if status.state != "not applied"}


def _revert(
    names: list[str],
    known: dict[str, Patch],
    args: argparse.Namespace,
    repository: Path,
) -> int:
    """Take the patches out; return the exit code."""
    everywhere = not known.keys() >= set(names)
    packages = [
        patch.package for patch in known.values() if everywhere or patch.name in names
    ]
    trees = _trees(packages, args.target, repository)
    left = False
    for tree in trees:
        out = names
        if EVERYTHING in (args.patch or ()):
            out = [*names, *engine.patches_in_tree(tree, known)]
        plan = engine.revert(tree, out, known, args.discard_edits)
        report(tree, plan, "revert")
        left |= bool(plan.left)
    return LEFT if left and not args.patch else 0


def _status(
    known: dict[str, Patch],
    sets: dict[str, list[str]],
    args: argparse.Namespace,
    repository: Path,
) -> int:
    shown = in_sets(args.patch or [], sets)
    damaged: list[str] = []
    packages = [patch.package for patch in known.values()]
    for tree in _trees(packages, args.target, repository):
        show(title(tree))
        if left := pending(tree):
            show(f"  interrupted: {left}")
        mine = [patch for patch in known.values() if patch.package == tree.package]
        statuses = engine.status(tree, mine, damaged)
        for name, status in statuses.items():
            if shown and name not in shown:
                continue
            show(f"  {name}: {_state(status)}")
            if name in known and status.files:
                _report_relations(known[name], _applied(statuses))
    for name, members in sets.items():
        show(f"set {name}: {', '.join(members)}")
    for why in damaged:
        show(f"damaged: {why}", file=sys.stderr)
    return REFUSED if damaged else 0


def _state(status: engine.PatchStatus) -> str:
    """Describe the state of a patch in a tree, in one line."""
    if not status.files:
        return f"{status.state}; {status.misfit or 'fits'}"
    values = "".join(f", {k}={v!r}" for k, v in status.parameters.items())
    unknown = "" if status.sha256 else ", no manifest here"
    return f"{status.state}{unknown} ({', '.join(status.files)}{values})"


def _list(
    known: dict[str, Patch],
    sets: dict[str, list[str]],
    releases: Mapping[str, list[Release]],
) -> None:
    for patch in known.values():
        values = "".join(f", {k}={v!r}" for k, v in patch.parameters.items())
        show(f"{patch.name} ({patch.package}{values}): {patch.summary}")
        tested = ", ".join(patch.tested(releases)) or "no release"
        show(f"  tested with {tested}; sha256 {patch.sha256[:16]}")
        for kind, other, why in patch.relations:
            show(f"  {kind} {other}: {why}")
    for name, members in sets.items():
        show(f"set {name}: {', '.join(members)}")
