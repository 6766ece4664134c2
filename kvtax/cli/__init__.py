# SPDX-License-Identifier: Apache-2.0
"""The command `kvtax`: one table of subcommands, one table of exit codes."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kvtax.paths import IN_CHECKOUT, REPOSITORY
from kvtax.signals import exit_on_signals


class Exit(IntEnum):
    """Exit codes of every subcommand."""

    GOOD = 0
    WORSE = 1  # a limit is broken, or a verdict got worse
    BAD_INPUT = 2
    NOT_MEASURED = 3
    BUSY = 4  # another measurement has the machine; later the command may succeed
    INTERNAL = 70  # an error in kvtax itself, shown with its traceback
    INTERRUPTED = 130
    CLOSED_PIPE = 141
    TERMINATED = 143


class Command(NamedTuple):
    """A subcommand. Its module has `configure(parser)` and `run(arguments) -> int`."""

    name: str
    summary: str
    module: str
    # Folder of a checkout that pip installs for it.
    package: str = "."
    # The action that may be left out: `fleet FILE` is `fleet run FILE`.
    default_action: str = ""


COMMANDS = (
    Command("demo", "look at records that kvtax ships", "kvtax.cli.demo"),
    Command("look", "show what step records say of a server", "kvtax.cli.look"),
    Command("run", "run a command with vLLM patched at import", "kvtax.cli.run"),
    Command("patch", "apply, revert or inspect patches of vLLM", "kvtax.cli.patch"),
    Command("gate", "measure one connector, check it against limits", "kvtax.cli.gate"),
    Command("compare", "compare two sweeps, check limits", "kvtax.cli.compare"),
    Command("sweep", "measure connectors against cache size", "microbench.command"),
    Command("axes", "measure connectors by release and axis", "kvtax.cli.axes"),
)
# Commands of the fleet's project, where it is not installed.
FLEET = [
    Command(name, "(needs pip install ./fleet in a checkout)", "kvtax_fleet", "./fleet")
    for name in ("fleet", "proxy", "trace")
]
# Environment variable by which a shell asks for completions (argcomplete).
COMPLETION = "_ARGCOMPLETE"
# Entry points by which another package adds its `Command`s.
ENTRY_POINTS = "kvtax.commands"
STDOUT = "standard output"
TEMPORARY = "No usable temporary directory"
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE}
CHECKOUT_ROOMS = {"microbench", "connectors", "tools"}
CHECKOUT_REMEDY = (
    "needs a checkout of kvtax and its environment: clone the repository, run "
    "bash setup.sh there, then .venv/bin/kvtax"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        exit_on_signals()
        _open_standard_streams()
    arguments = argparse.Namespace()
    try:
        try:
            if COMPLETION in os.environ:
                _complete(os.environ["COMP_LINE"].split()[1:])
            commands = subcommands(given)
            parser = _parser(given, commands)
            parser.parse_args(_with_action(given, commands), arguments)
            return int(arguments.run(arguments))
        finally:
            _flush()
    except BrokenPipeError:
        return Exit.CLOSED_PIPE
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except Exception as error:
        return _report(error, arguments)


def _report(error: Exception, arguments: argparse.Namespace) -> int:
    """Print an error as its reader needs it; return the exit code."""
    code = _code_of(error, arguments)
    if code is None:
        import traceback

        traceback.print_exception(error)
        return Exit.INTERNAL
    from kvtax.report.render import visible

    text = f"kvtax: {error}"
    if TEMPORARY in text:
        text += "; set TMPDIR to a folder that may be written"
    print("\n".join(map(visible, text.split("\n"))), file=sys.stderr)
    return code


def _open_standard_streams() -> None:
    """Open the streams that are closed (`>&-`), or files would get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without a sign such as µ shows a question mark for it.
        sys.stdout.reconfigure(errors="replace")


def _flush() -> None:
    """Write what stdout holds. Raises OSError, and nothing more at Python's end."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OSError(error.errno, error.strerror, STDOUT) from None


def _named(given: Sequence[str]) -> str | None:
    """Return the subcommand that `given` names, if any."""
    return next((word for word in given if not word.startswith("-")), None)


def subcommands(given: Sequence[str]) -> Sequence[Command]:
    """List all subcommands; ours alone if `given` names one of ours, to save time."""
    if _named(given) in {command.name for command in COMMANDS}:
        return COMMANDS
    added = [point.load() for point in entry_points(group=ENTRY_POINTS)]
    names = {command.name for command in added}
    return [*COMMANDS, *added, *(each for each in FLEET if each.name not in names)]


def _with_action(given: list[str], commands: Sequence[Command]) -> list[str]:
    """Insert the default action of a subcommand where it was left out."""
    actions = {command.name: command.default_action for command in commands}
    action = actions.get(given[0]) if given else None
    if not action or len(given) < 2 or given[1] in ("-h", "--help"):
        return given
    is_left_out = given[1].startswith("-") or given[1].endswith(".toml")
    return [given[0], action, *given[1:]] if is_left_out else given


def _code_of(error: Exception, arguments: argparse.Namespace) -> int | None:
    """Return the exit code of an error that is meant for the user, None for a bug.

    Rooms that import nothing of ours cannot share a base class, so an error class says
    with an attribute `exit_code` that its message tells the user what to do.
    """
    is_users = isinstance(error, OSError) and _is_of_user(error, arguments)
    return getattr(error, "exit_code", Exit.BAD_INPUT if is_users else None)


def _is_of_user(error: OSError, arguments: argparse.Namespace) -> bool:
    """Return whether the user can mend it: a full disk, or a path that they named."""
    if error.errno in NO_ROOM or error.filename == STDOUT or TEMPORARY in str(error):
        return True
    if not isinstance(error.filename, str | bytes):
        return False
    place = Path(os.fsdecode(error.filename)).absolute()
    return any(
        place.is_relative_to(named) or named.is_relative_to(place)
        for named in _paths_in(vars(arguments).values())
    )


def _paths_in(values: Iterable[object]) -> Iterator[Path]:
    for value in values:
        if isinstance(value, Path | str):
            yield Path(str(value).removeprefix("@")).absolute()
        elif isinstance(value, list | tuple):
            yield from _paths_in(value)


class UsageError(Exception):
    """The command cannot run here; the message says what to install."""

    exit_code = Exit.BAD_INPUT


class Parser(argparse.ArgumentParser):
    """A parser that names the command or value nearest to a mistyped one."""

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; refuse what is unknown with the usage of the subcommand it is of."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from kvtax.patcher.manifest import nearest

            near = nearest(str(value), map(str, action.choices))
            what = f"no {str(action.metavar or 'value').lower()} {value!r}{near}"
            choices = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(None, f"{what}; there are {choices}")


def _parser(
    given: Sequence[str], commands: Sequence[Command]
) -> argparse.ArgumentParser:
    """Build the parser, with the arguments of the subcommand named in `given` only.

    Others stay unread, so that help needs no heavy import.
    """
    parser = Parser(
        prog="kvtax",
        description="What a vLLM KV connector costs per engine step, and the fixes.",
        epilog="Exit codes: 0 good, 1 a limit is broken or a verdict got worse, 2 bad "
        "input, 3 could not measure, 4 the machine is busy with another measurement, "
        "70 an error in kvtax itself, 130 and 143 ended by a signal.",
    )
    parser.add_argument("--version", action=_Version)
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in commands:
        module = description = None
        if _named(given) == command.name:
            module, description = _module_and_help(command, given)
        subparser = parsers.add_parser(
            command.name,
            help=command.summary,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module:
            module.configure(subparser)
            subparser.set_defaults(run=partial(_run, command, module))
    return parser


def _module_and_help(
    command: Command, given: Sequence[str]
) -> tuple[ModuleType | None, str | None]:
    """Import the subcommand; where it is not installed, help says what it needs."""
    try:
        module = _load(command)
    except UsageError as error:
        if not {"-h", "--help"} & {*given}:
            raise
        return None, f"{command.summary[0].upper()}{command.summary[1:]}.\n\n{error}"
    return module, module.__doc__


def _load(command: Command) -> ModuleType:
    """Import the subcommand's module. Raises UsageError."""
    with _installed(command):
        return importlib.import_module(command.module)


def _run(command: Command, module: ModuleType, arguments: argparse.Namespace) -> int:
    """Run the subcommand, which imports what it needs. Raises UsageError."""
    with _installed(command):
        return int(module.run(arguments))


@contextmanager
def _installed(command: Command) -> Iterator[None]:
    """Raise UsageError for an import of what is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(f"{command.name}: {_remedy(command, error.name)}") from None


def require_checkout(command: str) -> None:
    """Raise UsageError if this is an installed wheel."""
    if not IN_CHECKOUT:
        raise UsageError(f"{command}: {CHECKOUT_REMEDY}")


def _remedy(command: Command, missing: str | None) -> str:
    if str(missing).partition(".")[0] in CHECKOUT_ROOMS:
        return CHECKOUT_REMEDY
    return (
        f"the package {missing} is missing: in a checkout of kvtax, pip install "
        f"{command.package}"
    )


def _complete(words: Sequence[str]) -> None:
    """Answer the shell's request for completions of `words`, and exit."""
    import argcomplete

    argcomplete.autocomplete(_parser(words, subcommands(words)))


class _Version(argparse.Action):
    """Print version and commit of the package; read them only if requested."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        commit = f" (commit {name})" if (name := _commit()) else ""
        parser.exit(message=f"kvtax {version('kvtax')}{commit}\n")


def _commit() -> str:
    """Return the commit that the wheel was built from, or that is checked out."""
    if (file := REPOSITORY / "COMMIT").is_file():
        return file.read_text().strip()
    if not IN_CHECKOUT:
        return ""
    import subprocess

    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run([*command, "--abbrev=12"], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()
