# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, what it returns, what it does not need."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtax.cli import Exit
from kvtax.cli import main as kvtax_main
from kvtax.patcher.cli import main
from tests.patcher.patchlab import block, make_patch, make_patches, make_tree, snapshot

REPOSITORY = Path(__file__).resolve().parents[2]


def make_lists(repository: Path, default_set: list[str]) -> None:
    """Write the sets of patches, and the releases that are tested."""
    sets = f'timing = {json.dumps(default_set)}\nrest = ["beta", "delta"]\n'
    sets += 'all = ["timing", "rest"]\n'
    (repository / "patches" / "sets.toml").write_text(sets)
    (repository / "configs").mkdir()
    releases = '[[demo]]\nversion = "0.18.1"\n'
    (repository / "configs" / "releases.toml").write_text(releases)


@pytest.fixture
def run(tree, patches, tmp_path, capsys):
    """Call the command line on the synthetic tree: (exit code, stdout, stderr)."""
    make_lists(tmp_path, ["alpha", "gamma"])

    def call(*argv, target=tree.root):
        argv = [*argv, "--target", str(target)] if target else list(argv)
        try:
            code = main(None, tmp_path, argv)
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


def states(out: str) -> dict[str, str]:
    lines = [line.strip().partition(": ") for line in out.splitlines()[1:]]
    return {name: state.partition(" (")[0] for name, _, state in lines}


def test_apply_status_revert_say_in_plain_words_what_they_did(run, tree):
    before = snapshot(tree.root)
    code, out, _ = run("--apply")
    assert code == 0
    assert out.splitlines() == [
        f"demo 0.18.1 in {tree.root}",
        "  changed: scheduler.py",
        "  changed: v1/bom.py",
        "  changed: v1/core.py",
        "  added: v1/new/__init__.py",
        "  added: v1/new/records.py",
        "set timing; --patch takes other sets, too: rest, all",
    ]
    assert run("--apply")[:2] == (
        0,
        f"demo 0.18.1 in {tree.root}\n  nothing to do, already applied\n"
        "set timing; --patch takes other sets, too: rest, all\n",
    )
    code, out, _ = run("--status")
    assert code == 0
    assert states(out) == {
        "alpha": "applied",
        "beta": "not applied; fits",
        "gamma": "applied",
        "delta": "not applied; fits",
        "epsilon": "not applied; fits",
        "set timing": "alpha, gamma",
        "set rest": "beta, delta",
        "set all": "alpha, gamma, beta, delta",
    }
    assert run("--revert")[0] == 0
    assert snapshot(tree.root) == before
    assert "nothing to do, not applied" in run("--revert")[1]


def test_revert_says_which_patches_it_takes_out_and_patch_keeps_the_others(run, tree):
    before = snapshot(tree.root)

    def reverted(*argv: str) -> list[str]:
        return [
            line
            for line in run("--revert", *argv)[1].splitlines()
            if "reverted" in line
        ]

    run("--apply", "--patch", "alpha")
    alone = snapshot(tree.root)
    run("--apply")  # the default set has alpha too
    assert reverted("--patch", "gamma") == ["  reverted: gamma"]
    assert snapshot(tree.root) == alone
    run("--revert", "--patch", "alpha")
    run("--apply", "--patch", "beta")
    run("--apply")
    assert reverted() == ["  reverted: alpha, gamma"]
    assert states(run("--status")[1])["beta"] == "applied"
    run("--revert", "--patch", "beta")
    assert snapshot(tree.root) == before
    assert reverted() == []


def test_a_set_is_taken_where_a_patch_is_and_revert_names_what_is_left(run, tree):
    before = snapshot(tree.root)
    assert run("--apply", "--patch", "all")[0] == 0
    assert "nothing to do" in run("--apply", "--patch", "rest", "--patch", "all")[1]
    applied = {n for n, s in states(run("--status")[1]).items() if s == "applied"}
    assert applied == {"alpha", "beta", "delta", "gamma"}
    shown = states(run("--status", "--patch", "rest")[1])
    assert [name for name in shown if "set " not in name] == ["beta", "delta"]
    code, out, _ = run("--revert")
    assert code == 1
    assert "  reverted: alpha, gamma\n" in out
    assert "  still in the tree: beta, delta (--revert --patch all takes" in out
    assert "still" not in run("--revert", "--patch", "all")[1]
    assert snapshot(tree.root) == before


def test_all_takes_out_patches_that_no_set_names(run, tree):
    before = snapshot(tree.root)
    for name in ("alpha", "epsilon"):
        run("--apply", "--patch", name)
    assert run("--revert", "--patch", "all")[0] == 0
    assert snapshot(tree.root) == before


def test_a_patch_takes_out_the_earlier_ones_that_it_replaces(run, tree, tmp_path):
    before = snapshot(tree.root)
    run("--apply", "--patch", "alpha", "--patch", "beta", "--patch", "gamma")
    manifest = tmp_path / "patches" / "alpha" / "patch.toml"
    manifest.write_text('replaces = ["beta", "gone"]\n' + manifest.read_text())
    out = run("--apply", "--patch", "alpha")[1]
    assert "  reverted: beta\n" in out
    applied = {n for n, s in states(run("--status")[1]).items() if s == "applied"}
    assert applied == {"alpha", "gamma"}
    manifest.write_text(manifest.read_text().replace("beta", "gamma", 1))
    assert "  reverted: alpha, gamma\n" in run("--revert", "--patch", "alpha")[1]
    assert snapshot(tree.root) == before


def test_check_changes_nothing_and_knows_the_tested_releases(run, tree):
    before = snapshot(tree.root)
    code, out, _ = run("--check")
    assert code == 0
    assert "would be changed: scheduler.py" in out
    assert "would be added: v1/new/records.py" in out
    assert "gamma: fits; 0.18.1 is a tested release" in out
    (tree.root / "_version.py").write_text("version = '0.99'\n")
    out = run("--check")[1]
    assert "gamma: fits, but is not tested on this release (0.18.1 are)" in out
    (tree.root / "_version.py").write_bytes(before["_version.py"][1])
    assert snapshot(tree.root) == before


def test_diff_and_list(run):
    code, out, _ = run("--diff", "--patch", "gamma")
    assert code == 0
    assert "+    return 200\n" in out
    code, out, _ = run("--list", target=None)
    assert code == 0
    assert "beta (demo, LIMIT=7): a test patch" in out
    assert "set timing: alpha, gamma" in out


def test_set_gives_a_parameter_and_status_shows_it(run, tree):
    assert run("--apply", "--patch", "beta", "--set", "LIMIT=250")[0] == 0
    assert "beta_in = 250\n" in (tree.root / "scheduler.py").read_text()
    assert "LIMIT=250" in run("--status")[1]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--apply --patch nope", "no patch or set 'nope'; there are"),
        ("--apply --set NONE=1", "parameter 'NONE' is not known"),
        ("--apply --set LIMIT=abc", "Python literal"),
        ("--apply --set LIMIT", "NAME=VALUE"),
        ("--revert --set LIMIT=1", "--set goes with"),
        ("--apply --revert", "not allowed with"),
        ("", "required"),
        ("--frobnicate", ""),
    ],
)
def test_refusals_and_wrong_usage_return_2_and_change_nothing(run, tree, argv, said):
    before = snapshot(tree.root)
    code, out, err = run(*argv.split())
    assert (code, out) == (2, "")
    assert said in err
    assert snapshot(tree.root) == before


def test_a_foreign_sentinel_is_nothing_to_say_and_half_a_block_is(run, tree):
    own = "# BLOCK_BEGIN of my own\n# BLOCK_BEGIN of:mine 01234567\n"
    (tree.root / "other.py").write_text(own)
    before = snapshot(tree.root)
    for action in ("--check", "--apply", "--status", "--revert"):
        assert (run(action)[0], run(action)[2]) == (0, "")
    assert snapshot(tree.root) == before
    (tree.root / "other.py").write_text("# BLOCK_BEGIN alpha:b0 01234567\n")
    said = "other.py:1: '# BLOCK_BEGIN alpha:b0 01234567' has no BLOCK_END of its own"
    for action in ("--check", "--apply", "--status", "--revert"):
        code, out, err = run(action)
        assert code == 2 and said in out + err


def test_an_edited_block_is_shown_and_taken_out_on_demand(run, tree):
    before = snapshot(tree.root)
    run("--apply")
    place = tree.root / "scheduler.py"
    place.write_text(place.read_text().replace("alpha_out = 4", "alpha_out = 5"))
    edited = place.read_bytes()
    code, _, err = run("--revert")
    assert code == 2 and "-        alpha_out = 4\n+        alpha_out = 5" in err
    assert run("--apply", "--discard-edits")[0] == 2
    code, out, _ = run("--revert", "--discard-edits")
    assert code == 0 and "added: scheduler.py.edited" in out
    copy = tree.root / "scheduler.py.edited"
    assert copy.read_bytes() == edited
    copy.unlink()
    assert snapshot(tree.root) == before


def test_without_a_default_set_the_patch_must_be_named(run, tmp_path):
    (tmp_path / "patches" / "sets.toml").unlink()
    assert run("--status")[0] == 0
    assert run("--apply", "--patch", "alpha")[0] == 0
    code, _, err = run("--apply")
    assert code == 2 and "no set 'timing'" in err


def test_check_returns_2_if_a_patch_does_not_fit(run, tree):
    scheduler = tree.root / "scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("tokens = 0", "tokens = 1"))
    before = snapshot(tree.root)
    code, out, _ = run("--check", "--patch", "beta")
    assert code == 2 and "the patch does not fit this release" in out
    assert run("--apply", "--patch", "beta")[0] == 2
    assert run("--check", "--patch", "gamma")[0] == 0
    assert snapshot(tree.root) == before


def test_no_such_package_is_refused(run, tmp_path):
    for action in ("--apply", "--revert", "--status", "--check"):
        code, _, err = run(action, target=tmp_path / "nowhere")
        assert code == 2
        assert "no package 'demo' at" in err
    code, _, err = run("--status", target=None)
    assert code == 2 and "name its place with --target" in err


def test_a_patch_reverts_by_name_after_its_folder_is_gone_or_broken(
    run, tree, tmp_path
):
    before = snapshot(tree.root)
    run("--apply")
    shutil.rmtree(tmp_path / "patches" / "alpha")
    assert "alpha: applied, no manifest here" in run("--status")[1]
    (tmp_path / "patches" / "gamma" / "patch.toml").write_text("broken")
    assert run("--status")[0] == 2
    assert run("--revert", "--patch", "alpha", "--patch", "gamma")[0] == 0
    assert snapshot(tree.root) == before


def test_patches_of_two_packages_are_checked_before_either_is_changed(
    run, tree, tmp_path
):
    make_patch(
        tmp_path / "patches",
        "other",
        [block("before", "", "x = 1", "y = 1", file="__init__.py")],
        package="second",
    )
    site = tree.root.parent
    other = make_tree(site, {"__init__.py": b"x = 2\n"}, "second")
    before = snapshot(site)
    both = ["--patch", "gamma", "--patch", "other"]
    assert run("--apply", *both, target=site)[0] == 2
    assert snapshot(site) == before
    (other.root / "__init__.py").write_text("x = 1\n")
    before = snapshot(site)
    assert run("--apply", *both, target=site)[0] == 0
    assert "second (version unknown)" in run("--status", target=site)[1]
    assert run("--revert", *both, target=site)[0] == 0
    assert snapshot(site) == before


@pytest.fixture
def house(tmp_path):
    """A copy of the engine and its script, with the synthetic patches."""
    folder = tmp_path / "house"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        REPOSITORY / "kvtax" / "patcher", folder / "kvtax" / "patcher", ignore=ignore
    )
    shutil.copy(REPOSITORY / "kvtax" / "__init__.py", folder / "kvtax")
    shutil.copy(REPOSITORY / "apply_step_timing_v2.py", folder)
    make_patches(folder / "patches")
    make_lists(folder, ["alpha", "beta"])
    return folder


def script(folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess:
    # -I -S: nothing but the standard library can be imported.
    run = [sys.executable, "-I", "-S", str(folder / "apply_step_timing_v2.py"), *argv]
    return subprocess.run(run, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_the_script_needs_the_standard_library_only(house, tree):
    before = snapshot(tree.root)
    out = script(house, "--apply", "--target", str(tree.root))
    assert (out.returncode, out.stderr) == (0, "")
    assert "changed: scheduler.py" in out.stdout
    assert script(house, "--revert", "--target", str(tree.root)).returncode == 0
    assert snapshot(tree.root) == before
    text = script(house, "--help").stdout
    assert "0 done, or nothing to do; 1 --revert" in " ".join(text.split())


def test_an_old_python_gets_one_sentence_and_no_traceback(house):
    path = house / "apply_step_timing_v2.py"
    ast.parse(path.read_text(), feature_version=(3, 8))
    code = "import runpy, sys; sys.version_info = (3, 8, 10); sys.version = '3.8.10 x'"
    code += f"; runpy.run_path({str(path)!r}, run_name='__main__')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (out.returncode, out.stdout) == (2, "")
    (line,) = out.stderr.splitlines()
    assert "needs Python >= 3.11, and this is 3.8.10;" in line


@pytest.mark.slow
def test_the_default_target_is_what_this_python_would_import(house, tree):
    environment = os.environ | {"PYTHONPATH": str(tree.root.parent)}
    run = [sys.executable, str(house / "apply_step_timing_v2.py"), "--check"]
    out = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert f"demo 0.18.1 in {tree.root}" in out.stdout
    # Without one, the environment of the repository that holds the script.
    site = house / ".venv" / "lib" / "python3.11" / "site-packages"
    root = make_tree(site).root
    assert f"demo 0.18.1 in {root}" in script(house, "--check").stdout


def test_a_reader_that_leaves_early_does_not_look_like_a_refusal(house, tree):
    reader, writer = os.pipe()
    os.close(reader)
    run = [sys.executable, str(house / "apply_step_timing_v2.py"), "--apply"]
    run += ["--target", str(tree.root)]
    out = subprocess.run(run, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (out.returncode, out.stderr) == (Exit.CLOSED_PIPE, "")
    assert "beta_in" in (tree.root / "scheduler.py").read_text()


def test_a_path_that_the_locale_cannot_show_ends_nothing(house, tmp_path):
    tree = make_tree(tmp_path / "caf\xe9")
    run = [sys.executable, str(house / "apply_step_timing_v2.py"), "--apply"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    out = subprocess.run(
        [*run, "--target", str(tree.root)], capture_output=True, env=environment
    )
    assert (out.returncode, out.stderr) == (0, b"")
    assert rb"caf\xe9" in out.stdout and b"changed: scheduler.py" in out.stdout


@pytest.mark.slow
def test_kvtax_patch_takes_the_same_options_and_returns_the_same_codes(
    tmp_path, capsys
):
    assert kvtax_main(["patch", "--list"]) == 0
    assert "set timing: step_timing_v2" in capsys.readouterr().out
    for action in ("--check", "--apply", "--revert", "--status"):
        assert kvtax_main(["patch", action, "--target", str(tmp_path)]) == 2
        assert "no package" in capsys.readouterr().err
    tree = make_tree(tmp_path, name="vllm")
    before = snapshot(tree.root)
    assert kvtax_main(["patch", "--check", "--target", str(tmp_path)]) == 2
    assert snapshot(tree.root) == before
