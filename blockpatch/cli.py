# SPDX-License-Identifier: Apache-2.0
"""The command line: one action, some patches, one target."""

import argparse
import ast
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import engine
from .errors import BlockPatchError, ManifestError, TargetError
from .journal import pending, settle
from .manifest import load_patches, load_sets
from .parameters import resolve_parameters
from .patch import Patch
from .plan import Plan
from .target import Tree, find_package, locate

_EPILOG = """\
exit codes: 0 done, or nothing to do; 1 refused, the tree as it was; 2 wrong usage.
Ctrl-C and SIGTERM wait until the change is whole. After a kill, the next --apply or
--revert finishes or undoes what was under way, or gives it up if somebody has changed
the files since. The other actions never write.
"""


def main(
    argv: Sequence[str] | None, patches_dir: Path, default_set: str | None = None
) -> int:
    """Run one action on the patches in ``patches_dir``; returns the exit code.

    Wrong usage exits with 2 (argparse).
    """
    parser = _parser(default_set)
    args = parser.parse_args(argv)
    if args.set and args.action not in ("apply", "check", "diff"):
        parser.error("--set goes with --apply, --check or --diff")
    if not (args.patch or default_set or args.action in ("list", "status")):
        parser.error(f"--{args.action} needs --patch NAME")
    try:
        _run(args, patches_dir, default_set)
        sys.stdout.flush()
    except BlockPatchError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader left early; what there was to do is done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _run(args: argparse.Namespace, folder: Path, default_set: str | None) -> None:
    if args.action == "list":
        _list(load_patches(folder), load_sets(folder))
    elif args.action == "status":
        _status(load_patches(folder), args)
    elif args.action == "revert":
        _revert(_names(args, folder, default_set), _manifests_if_sound(folder), args)
    else:
        patches = _select(load_patches(folder), _names(args, folder, default_set))
        _put(patches, args)


def _parser(default_set: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Apply, revert and inspect source patches in a Python package.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action = parser.add_mutually_exclusive_group(required=True)
    for name, text in {
        "apply": "apply the patches; those applied already are brought up to date",
        "revert": "take the patches out again, to the identical bytes, and say which; "
        "without --patch all of the default set, also one that was applied on its own",
        "status": "say for every patch whether the tree has it",
        "check": "say whether the patches would apply; nothing is changed",
        "diff": "print what the patches change, against the tree without them",
        "list": "list the patches",
    }.items():
        action.add_argument(
            f"--{name}", dest="action", action="store_const", const=name, help=text
        )
    default = f"the set {default_set!r} of patches/sets.toml" if default_set else "none"
    parser.add_argument(
        "--patch",
        action="append",
        metavar="NAME",
        help="a single patch, never a set; may be repeated; status shows all without "
        f"it (default: {default})",
    )
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="the package directory, a directory that contains it, or a source tree "
        "(default: what this Python would import, else the repository's .venv)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="a parameter of a patch; VALUE is a Python literal",
    )
    return parser


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if not (name and equals):
            raise ValueError
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE with a Python literal (strings in quotes)"
        ) from None


def _names(
    args: argparse.Namespace, folder: Path, default_set: str | None
) -> list[str]:
    if args.patch:
        return list(dict.fromkeys(args.patch))
    sets = load_sets(folder)
    if default_set not in sets:
        raise ManifestError(f"{folder / 'sets.toml'} has no set {default_set!r}")
    return sets[default_set]


def _select(known: dict[str, Patch], names: list[str]) -> list[Patch]:
    for name in names:
        if name not in known:
            raise ManifestError(
                f"no patch {name!r}; there are {', '.join(sorted(known)) or 'none'}"
            )
    return [known[name] for name in names]


def _manifests_if_sound(folder: Path) -> dict[str, Patch]:
    """Reverting must not depend on manifests; they only say which package."""
    try:
        return load_patches(folder)
    except ManifestError:
        return {}


def _tree(package: str, target: Path | None) -> Tree:
    if target is not None:
        return locate(package, target)
    repository = Path(__file__).resolve().parents[1]
    return Tree(
        find_package(package, repository.glob(".venv/lib/python3*/site-packages"))
    )


def _trees(packages: Iterable[str], target: Path | None) -> list[Tree]:
    """The trees of those packages that are there. Raises TargetError if none is."""
    names = sorted(packages)
    if target is not None and (target / "__init__.py").is_file():
        names = [target.absolute().name]
    trees, misses = [], []
    for name in names:
        try:
            trees.append(_tree(name, target))
        except TargetError as error:
            misses.append(error)
    if not trees:
        raise misses[0] if misses else TargetError("name the tree with --target")
    return trees


def _title(tree: Tree) -> str:
    return f"{tree.package} {tree.version or '(version unknown)'} in {tree.root}"


def _put(patches: list[Patch], args: argparse.Namespace) -> None:
    """Apply, check or diff. Every tree is checked before the first is changed."""
    values = dict(args.set)
    resolve_parameters({patch.name: patch.parameters for patch in patches}, values)
    jobs = []
    for package in dict.fromkeys(patch.package for patch in patches):
        mine = [patch for patch in patches if patch.package == package]
        own = {name for patch in mine for name in patch.parameters}
        given = {name: value for name, value in values.items() if name in own}
        jobs.append((_tree(package, args.target), mine, given))
    if args.action == "apply":
        for tree, _, _ in jobs:
            settle(tree)
    plans = [engine.check(*job) for job in jobs]
    if args.action == "apply":
        plans = [engine.apply(*job) for job in jobs]
    for (tree, mine, _), plan in zip(jobs, plans, strict=True):
        if args.action == "diff":
            print(plan.diff(), end="")
            continue
        _report(tree, plan, args.action)
        in_tree = _applied(engine.status(tree)) if args.action == "check" else ()
        for patch in mine if args.action == "check" else ():
            _report_tested(patch, tree)
            _report_relations(patch, {*in_tree, *(other.name for other in mine)})


def _report(tree: Tree, plan: Plan, action: str) -> None:
    print(_title(tree))
    if plan.removed:
        print(f"  reverted: {', '.join(plan.removed)}")
    for change in plan.changes:
        would = "would be " if action == "check" else ""
        print(f"  {would}{change.kind}: {change.path}")
    if not plan.changes:
        state = "not applied" if action == "revert" else "already applied"
        print(f"  nothing to do, {state}")


def _report_tested(patch: Patch, tree: Tree) -> None:
    tested = ", ".join(patch.tested)
    if patch.is_tested(tree.version):
        print(f"  {patch.name}: fits; {tree.version} is a tested release")
    else:
        print(f"  {patch.name}: fits, but is not tested on this release ({tested} are)")


def _report_relations(patch: Patch, present: set[str]) -> None:
    for kind, other, why in patch.relations:
        there = "there" if other in present else "not there"
        print(f"    {kind} {other} ({there}): {why}")


def _applied(found: Mapping[str, engine.PatchStatus]) -> set[str]:
    return {name for name, state in found.items() if state.state != "not applied"}


def _revert(names: list[str], known: dict[str, Patch], args) -> None:
    everywhere = not known.keys() >= set(names)
    packages = {
        patch.package for patch in known.values() if everywhere or patch.name in names
    }
    trees = _trees(packages, args.target)
    plans = [engine.revert(tree, names) for tree in trees]
    for tree, plan in zip(trees, plans, strict=True):
        _report(tree, plan, "revert")


def _status(known: dict[str, Patch], args: argparse.Namespace) -> None:
    for tree in _trees({patch.package for patch in known.values()}, args.target):
        print(_title(tree))
        if left := pending(tree):
            print(f"  interrupted: {left}")
        mine = [patch for patch in known.values() if patch.package == tree.package]
        all_found = engine.status(tree, mine)
        for name, found in all_found.items():
            if args.patch and name not in args.patch:
                continue
            values = "".join(f", {k}={v!r}" for k, v in found.parameters.items())
            where = f" ({', '.join(found.files)}{values})" if found.files else ""
            unknown = "" if found.sha256 else ", no manifest here"
            print(f"  {name}: {found.state}{unknown}{where}")
            if name in known and found.files:
                _report_relations(known[name], _applied(all_found))


def _list(known: dict[str, Patch], sets: dict[str, list[str]]) -> None:
    for patch in known.values():
        values = "".join(f", {k}={v!r}" for k, v in patch.parameters.items())
        print(f"{patch.name} ({patch.package}{values}): {patch.summary}")
        print(f"  tested with {', '.join(patch.tested)}; sha256 {patch.sha256[:16]}")
        for kind, other, why in patch.relations:
            print(f"  {kind} {other}: {why}")
    for name, members in sets.items():
        print(f"set {name}: {', '.join(members)}")
