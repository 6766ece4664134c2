# SPDX-License-Identifier: Apache-2.0
"""The command `kvtax`: help is quick, exit codes follow one table, pipes may close."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtax.axes.gate import NotMeasured
from kvtax.cli import CHECKOUT_ROOMS, COMMANDS, Exit, main
from kvtax.cli.demo import ASIDE, _aside
from kvtax.paths import REPOSITORY

KVTAX = [sys.executable, "-m", "kvtax"]
# CPU time of a Python that does nothing, as much of which help may take.
MOST_OF_BARE = 7


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVTAX, *arguments], cwd=REPOSITORY, capture_output=True, text=True, **options
    )


def cpu_s(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["look", "--help"]])
def test_help_costs_little_cpu(arguments):
    """In pairs, as the machine may be twice as slow a second later."""
    ratios = [
        cpu_s(*KVTAX, *arguments) / cpu_s(sys.executable, "-c", "pass")
        for _ in range(5)
    ]
    assert min(ratios) <= MOST_OF_BARE


@pytest.fixture(autouse=True)
def machine_of_its_own(monkeypatch):
    """Hold another lock than the sweeps that other tests and people run meanwhile."""
    name = f"kvtax-test-{os.getpid()}.lock"
    monkeypatch.setattr("kvtax.proc.machine_lock.MEASUREMENT", name)


@pytest.fixture
def ended(capsys, monkeypatch, signals):
    """Run `kvtax` in this process; return its exit code and what it printed."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(REPOSITORY)

    def of(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(list(arguments))
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return of


def test_a_demo_waits_for_no_pipe_of_its_name_and_nobody_else_writes_there(tmp_path):
    os.mkfifo(tmp_path / f"{ASIDE}pipe")
    (tmp_path / f"{ASIDE}link").symlink_to(tmp_path)
    before = os.umask(0)
    try:
        with _aside(tmp_path) as aside:
            assert aside.stat().st_mode & 0o077 == 0
    finally:
        os.umask(before)
    assert sorted(tmp_path.iterdir()) == [
        tmp_path / f"{ASIDE}{n}" for n in ("link", "pipe")
    ]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_subcommand_has_help_and_is_in_the_overview(ended, command):
    assert command.summary in " ".join(ended("--help")[1].split())
    code, shown, errors = ended(command.name, "--help")
    assert (code, errors) == (Exit.GOOD, "")
    assert f"kvtax {command.name}" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["look"],
        ["look", "no/such/folder"],
        ["look", ".", "--prometheus", "nonsense"],
        ["look", ".", "--prometheus", "127.0.0.1:65536"],
        ["compare", "no/such/old", "no/such/new"],
        ["trace", "stats", "no/such/trace"],
        ["patch", "--check", "--target", "no/such/vllm"],
        ["gate", "no_such_module:Connector", "--python", "/no/such/python"],
        ["fleet", "no/such/experiment.toml", "--virtual"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_of_error_and_exit_code_2(ended, arguments):
    code, _, errors = ended(*arguments)
    assert code == Exit.BAD_INPUT
    assert "Traceback" not in errors
    assert errors.strip()


@pytest.mark.parametrize(
    ("error", "code", "is_shown_whole"),
    [
        (ConnectionRefusedError(111, "Connection refused"), Exit.INTERNAL, True),
        (FileNotFoundError(2, "No such file", "/internal/table"), Exit.INTERNAL, True),
        (KeyError("x"), Exit.INTERNAL, True),
        (FileNotFoundError(2, "No such file", "/named/x.json"), Exit.BAD_INPUT, False),
        (OSError(28, "No space left on device", "/other"), Exit.BAD_INPUT, False),
    ],
)
def test_an_error_that_the_user_cannot_mend_has_its_traceback(
    error, code, is_shown_whole, monkeypatch, capsys, signals
):
    def fail(arguments):
        raise error

    monkeypatch.setattr("kvtax.cli.compare.run", fail)
    assert main(["compare", "/named", "/named"]) == code
    assert ("Traceback" in capsys.readouterr().err) == is_shown_whole


def test_a_closed_pipe_ends_quietly():
    command = subprocess.Popen(
        [*KVTAX, "--help"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    command.stdout.close()
    _, errors = command.communicate()
    assert errors == b""
    assert command.returncode in (Exit.GOOD, Exit.CLOSED_PIPE)


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command.replace("kvtax", " ".join(KVTAX))],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=os.environ | env,
    )


@pytest.fixture
def sample(tmp_path) -> str:
    """The command that makes a small trace."""
    line = '{"timestamp": 1, "input_length": 1, "output_length": 2, "hash_ids": [0]}'
    (tmp_path / "source").write_text(line)
    return f"kvtax trace sample {tmp_path}/source {tmp_path}/trace --requests 1"


@pytest.mark.slow
def test_a_command_whose_stdout_is_closed_works_and_writes_into_no_file(
    sample, tmp_path
):
    made = shell(f"{sample} >&- <&-")
    assert (made.returncode, made.stderr) == (Exit.GOOD, "")
    first, *_ = (tmp_path / "trace").read_text().splitlines()
    assert first.startswith("{")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["kvtax --help", "{sample}"])
def test_output_that_cannot_be_written_is_one_line_of_error(command, sample):
    buffered = {"PYTHONUNBUFFERED": ""}
    ended = shell(f"{command.format(sample=sample)} > /dev/full", **buffered)
    assert ended.returncode == Exit.BAD_INPUT
    assert ended.stderr == (
        "kvtax: [Errno 28] No space left on device: 'standard output'\n"
    )


@pytest.mark.slow
def test_a_sign_that_the_terminal_lacks_is_no_error(sample, tmp_path):
    assert shell(sample).returncode == Exit.GOOD
    described = shell(
        f"cd {tmp_path}; mv trace µ; kvtax trace stats µ",
        PYTHONIOENCODING="ascii",
        PYTHONPATH=str(REPOSITORY),
    )
    assert (described.returncode, described.stderr) == (Exit.GOOD, "")
    assert "| requests |" in described.stdout


def test_no_subcommand_is_missing_from_the_readme():
    readme = (REPOSITORY / "README.md").read_text()
    assert [
        listed.name for listed in COMMANDS if f"kvtax {listed.name}" not in readme
    ] == []


@pytest.mark.parametrize(
    ("missing", "command", "remedy"),
    [
        *((room, "sweep", "checkout") for room in sorted(CHECKOUT_ROOMS)),
        ("aiohttp", "proxy", "pip install ./fleet"),
    ],
)
def test_a_command_says_what_it_needs_and_has_not(
    missing, command, remedy, monkeypatch, capsys
):
    def absent(name: str):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("kvtax.cli.importlib.import_module", absent)
    assert main([command]) == Exit.BAD_INPUT
    assert remedy in capsys.readouterr().err


def test_without_the_fleet_help_says_what_its_commands_need(ended, monkeypatch):
    monkeypatch.setattr("kvtax.cli.entry_points", lambda group: [])
    monkeypatch.setitem(sys.modules, "kvtax_fleet", None)
    _, shown, _ = ended("--help")
    for name in ("fleet", "proxy", "trace"):
        assert f"    {name}  " in shown
        code, _, printed = ended(name, "--url", "a=http://h:1")
        assert code == Exit.BAD_INPUT
        assert "pip install ./fleet" in printed
    assert shown.count("(needs pip install ./fleet in a checkout)") == 3


def test_completion_lists_subcommands_and_their_options(tmp_path):
    answers = tmp_path / "answers"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answers),
        "COMP_LINE": "kvtax look --per",
        "COMP_POINT": "16",
        "_ARGCOMPLETE_IFS": "\n",
    }
    run(env=environment)
    assert Path(answers).read_text().split() == ["--perfetto"]


AXES = '[axes.running]\nshape = { connector = "flat" }\n'


@pytest.fixture
def exit_code(monkeypatch, tmp_path):
    """Return the exit code and whether a sweep ran, for made-up outcomes of both."""

    def of(gate: bool | None, swept: Exit, limits: str = "") -> tuple[int, bool]:
        sweeps = []

        def made_up(_):
            if gate is None:
                raise NotMeasured("mine did not start")
            return SimpleNamespace(worse=gate)

        monkeypatch.setattr("kvtax.axes.gate.gate", made_up)
        monkeypatch.setattr("kvtax.axes.gate.markdown", str)
        monkeypatch.setattr(
            "microbench.command._measure", lambda *_: sweeps.append(1) or swept
        )
        file = tmp_path / "limits.toml"
        file.write_text(limits)
        options = ["--connector", "mine:Mine", "--limits", str(file)]
        return main(["sweep", *options]), bool(sweeps)

    return of


@pytest.mark.slow
def test_a_limit_that_is_broken_on_either_side_ends_with_1(exit_code):
    assert exit_code(False, Exit.GOOD) == (Exit.GOOD, True)
    assert exit_code(True, Exit.GOOD) == (Exit.WORSE, True)
    assert exit_code(False, Exit.WORSE) == (Exit.WORSE, True)


@pytest.mark.slow
def test_a_connector_that_the_gate_cannot_start_is_swept(exit_code):
    assert exit_code(None, Exit.GOOD) == (Exit.GOOD, True)
    assert exit_code(None, Exit.WORSE) == (Exit.WORSE, True)


@pytest.mark.slow
def test_limits_along_axes_that_were_not_measured_do_not_pass(exit_code):
    assert exit_code(None, Exit.GOOD, AXES) == (Exit.NOT_MEASURED, False)


def test_limits_that_cannot_be_read_stop_a_sweep_before_it_begins(exit_code):
    assert exit_code(False, Exit.GOOD, "nonsense") == (Exit.BAD_INPUT, False)


def test_help_of_run_all_names_every_option():
    import argparse
    import re

    from kvtax.paths import REPOSITORY
    from microbench import command

    parser = argparse.ArgumentParser()
    command.configure(parser)
    options = {name for action in parser._actions for name in action.option_strings}
    comment = (REPOSITORY / "run_all.sh").read_text().partition("\nset -euo")[0]
    assert options - {"-h", "--help"} <= set(re.findall(r"--[a-z-]+", comment))


@pytest.mark.parametrize(
    ("line", "usage", "nearest"),
    [
        ("lok D", "kvtax", "no command 'lok' (did you mean look?)"),
        ("fleet rn", "kvtax fleet", "no action 'rn' (did you mean run?)"),
        ("look D --frob", "kvtax look", "unrecognized arguments: --frob"),
    ],
)
def test_a_mistyped_word_names_the_nearest_and_its_usage(capsys, line, usage, nearest):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == Exit.BAD_INPUT
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: {usage} [")
    assert nearest in shown


def test_help_of_what_is_not_installed_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "microbench", None)
    monkeypatch.delitem(sys.modules, "microbench.command", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--help"])
    assert ended.value.code == Exit.GOOD
    assert "needs a checkout of kvtax" in " ".join(capsys.readouterr().out.split())


def test_a_wrong_target_names_the_package_that_most_patches_are_for(tmp_path, capsys):
    assert main(["patch", "--status", "--target", str(tmp_path)]) == Exit.BAD_INPUT
    assert f"no package 'vllm' at {tmp_path}" in capsys.readouterr().err


FILES = {
    "__init__.py": "",
    "_version.py": "__version__ = version = '0.18.1'\n",
    "v1/__init__.py": "",
    "v1/engine/__init__.py": "",
    "v1/engine/core.py": "class EngineCore:\n    def __init__(self):\n"
    "        load_general_plugins()\n",
    "v1/worker/__init__.py": "",
    "v1/worker/worker_base.py": "class WorkerWrapperBase:\n"
    "    def init_worker(self):\n        load_general_plugins()\n",
}
USED = """
import inspect, vllm.v1.engine.core as core
print("kvtax_probe" in inspect.getsource(core))
"""


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder with the package, and a script that uses it."""
    site = tmp_path / "site"
    for path, text in FILES.items():
        (site / "vllm" / path).parent.mkdir(parents=True, exist_ok=True)
        (site / "vllm" / path).write_text(text)
    (tmp_path / "serve.py").write_text(USED)
    (tmp_path / "tmp").mkdir()
    return site


def run_below(
    site: Path, *command: str, fix: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    options = ["--fix", fix] if fix else ["--records", "records"]
    kvtax = [sys.executable, "-m", "kvtax", "run", *options, "--"]
    own = {
        "PYTHONPATH": f"{site}{os.pathsep}{Path.cwd()}",
        "TMPDIR": str(site.parent / "tmp"),
    }
    return subprocess.run(
        [*kvtax, *command],
        cwd=site.parent,
        env=os.environ | own | env,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_command_that_is_patched_ends_with_its_own_code(site):
    done = run_below(site, sys.executable, "serve.py")
    assert (done.returncode, done.stdout) == (Exit.GOOD, "True\n")
    gets, never = done.stderr.splitlines()
    assert gets.endswith("gets step_timing_v2")
    assert never == "kvtax: never imported: vllm.v1.worker.worker_base"
    assert not [*(site.parent / "tmp").iterdir()]


@pytest.mark.slow
def test_a_command_in_which_nothing_was_patched_is_code_3(site):
    done = run_below(site, sys.executable, "-c", "import vllm")
    assert done.returncode == Exit.NOT_MEASURED
    assert "never imported: vllm.v1.engine.core, vllm.v1.worker" in done.stderr
    assert "so nothing was patched" in done.stderr
    done = run_below(site, sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 7 and "so nothing was patched" in done.stderr
    # Seen at the end alone: a program of which we know nothing.
    alone = (
        "import os, sys; os.execve(sys.executable, [sys.executable, 'serve.py'], {})"
    )
    done = run_below(
        site, sys.executable, "-c", alone.replace("{}", f"{{'PYTHONPATH': '{site}'}}")
    )
    assert (done.returncode, done.stdout) == (Exit.NOT_MEASURED, "False\n")


# It is patched, and starts a process that is not.
PARENT = """
import subprocess, sys, vllm.v1.engine.core
code = f"import sys; sys.path.insert(0, {sys.argv[1]!r}); import vllm.v1.engine.core"
wait = "; import time; time.sleep(60)"
subprocess.run([sys.executable, "-I", "-c", code + wait])
"""


@pytest.mark.slow
def test_with_a_fix_a_process_without_it_ends_the_command(site):
    (site.parent / "parent.py").write_text(PARENT)
    done = run_below(site, sys.executable, "parent.py", str(site), fix="timing")
    assert done.returncode == Exit.NOT_MEASURED
    assert "imports vLLM without the patches" in done.stderr
    assert "the command is ended" in done.stderr


@pytest.mark.slow
def test_a_command_that_shuts_the_patches_out_is_refused(site):
    done = run_below(site, sys.executable, "-I", "serve.py")
    assert (done.returncode, done.stdout) == (Exit.BAD_INPUT, "")
    assert "-I reads no PYTHONPATH" in done.stderr


@pytest.mark.slow
def test_a_tree_of_links_is_patched(site, tmp_path):
    linked = tmp_path / "links" / "vllm"
    for path in filter(Path.is_file, (site / "vllm").rglob("*")):
        place = linked / path.relative_to(site / "vllm")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path)
    done = run_below(
        linked.parent, sys.executable, "serve.py", TMPDIR=str(tmp_path / "tmp")
    )
    assert (done.returncode, done.stdout) == (Exit.GOOD, "True\n"), done.stderr


@pytest.mark.slow
def test_without_a_folder_for_temporary_files_tmpdir_is_named(site):
    script = (
        "import tempfile, sys; from kvtax.cli import main;"
        "tempfile._candidate_tempdir_list = lambda: ['/proc'];"
        "from kvtax.proc import user_files; user_files._is_private = lambda _: False;"
        "sys.exit(main(['run', '--records', 'r', '--', sys.executable, 'serve.py']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=site.parent,
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{Path.cwd()}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == Exit.BAD_INPUT
    assert "set TMPDIR to a folder that may be written" in done.stderr
