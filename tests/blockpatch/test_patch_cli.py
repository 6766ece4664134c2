# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, what it returns, what it does not need."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patchlab import block, make_patch, make_patches, make_tree, snapshot

from blockpatch import apply
from blockpatch.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tree, patches, tmp_path, capsys):
    """Call the command line on the synthetic tree: (exit code, stdout, stderr)."""
    folder = tmp_path / "patches"
    (folder / "sets.toml").write_text('gamma = ["alpha", "gamma"]\n')

    def call(*argv, target=tree.root, default_set="gamma"):
        argv = [*argv, "--target", str(target)] if target else list(argv)
        try:
            code = main(argv, folder, default_set)
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
    ]
    assert run("--apply")[:2] == (
        0,
        f"demo 0.18.1 in {tree.root}\n  nothing to do, already applied\n",
    )
    code, out, _ = run("--status")
    assert code == 0
    assert states(out) == {
        "alpha": "applied",
        "beta": "not applied",
        "gamma": "applied",
        "delta": "not applied",
        "epsilon": "not applied",
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
    run("--apply", "--patch", "beta")
    run("--apply")
    assert reverted() == ["  reverted: alpha, gamma"]
    assert states(run("--status")[1])["beta"] == "applied"
    run("--revert", "--patch", "beta")
    assert snapshot(tree.root) == before
    run("--apply", "--patch", "alpha")
    assert reverted() == ["  reverted: alpha"]
    assert reverted() == []


def test_patch_names_a_single_patch_even_where_a_set_has_its_name(run):
    run("--apply", "--patch", "gamma")
    out = run("--status")[1]
    assert {n for n, s in states(out).items() if s == "applied"} == {"gamma"}
    out = run("--status", "--patch", "gamma")[1]
    assert states(out) == {"gamma": "applied"}


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
    assert "set gamma: alpha, gamma" in out


def test_set_gives_a_parameter_and_status_shows_it(run, tree):
    assert run("--apply", "--patch", "beta", "--set", "LIMIT=250")[0] == 0
    assert "beta_in = 250\n" in (tree.root / "scheduler.py").read_text()
    assert "LIMIT=250" in run("--status")[1]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--apply", "--patch", "nope"], 1, "no patch 'nope'; there are alpha, beta"),
        (["--apply", "--set", "NONE=1"], 1, "parameter 'NONE' is not known"),
        (["--apply", "--set", "LIMIT=abc"], 2, "Python literal"),
        (["--apply", "--set", "LIMIT"], 2, "NAME=VALUE"),
        (["--revert", "--set", "LIMIT=1"], 2, "--set goes with"),
        (["--apply", "--revert"], 2, "not allowed with"),
        ([], 2, "required"),
        (["--frobnicate"], 2, ""),
    ],
)
def test_refusals_return_1_and_wrong_usage_2(run, tree, argv, code, said):
    before = snapshot(tree.root)
    found, out, err = run(*argv)
    assert (found, out) == (code, "")
    assert said in err
    assert snapshot(tree.root) == before


def test_without_a_default_set_the_patch_must_be_named(run):
    assert run("--apply", default_set=None)[0] == 2
    assert run("--status", default_set=None)[0] == 0
    code, _, err = run("--apply", default_set="unknown")
    assert code == 1 and "no set 'unknown'" in err


def test_no_such_package_is_refused(run, tmp_path):
    for action in ("--apply", "--revert", "--status", "--check"):
        code, _, err = run(action, target=tmp_path / "nowhere")
        assert code == 1
        assert "no package 'demo' at" in err
    code, _, err = run("--status", target=None)
    assert code == 1 and "name its place with --target" in err


def test_a_patch_reverts_by_name_after_its_folder_is_gone_or_broken(
    run, tree, tmp_path
):
    before = snapshot(tree.root)
    run("--apply")
    shutil.rmtree(tmp_path / "patches" / "alpha")
    assert "alpha: applied, no manifest here" in run("--status")[1]
    (tmp_path / "patches" / "gamma" / "patch.toml").write_text("broken")
    assert run("--status")[0] == 1
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
    assert run("--apply", *both, target=site)[0] == 1
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
    shutil.copytree(REPOSITORY / "blockpatch", folder / "blockpatch", ignore=ignore)
    shutil.copy(REPOSITORY / "apply_step_timing_v2.py", folder)
    make_patches(folder / "patches")
    (folder / "patches" / "sets.toml").write_text(
        'step_timing_v2 = ["alpha", "beta"]\n'
    )
    return folder


def script(folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess:
    # -I -S: nothing but the standard library can be imported.
    run = [sys.executable, "-I", "-S", str(folder / "apply_step_timing_v2.py"), *argv]
    return subprocess.run(run, capture_output=True, text=True, env=environment)


def test_the_script_needs_the_standard_library_only(house, tree):
    before = snapshot(tree.root)
    out = script(house, "--apply", "--target", str(tree.root))
    assert (out.returncode, out.stderr) == (0, "")
    assert "changed: scheduler.py" in out.stdout
    assert script(house, "--revert", "--target", str(tree.root)).returncode == 0
    assert snapshot(tree.root) == before
    text = script(house, "--help").stdout
    assert "0 done, or nothing to do; 1 refused, the tree as it was; 2 wrong usage" in (
        " ".join(text.split())
    )


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
    assert (out.returncode, out.stderr) == (0, "")
    assert "beta_in" in (tree.root / "scheduler.py").read_text()


def test_the_module_runs_too(house, tree):
    run = [sys.executable, "-m", "blockpatch", "--check", "--patch", "gamma"]
    target = ["--target", str(tree.root)]
    out = subprocess.run([*run, *target], capture_output=True, text=True, cwd=house)
    assert "gamma: fits" in out.stdout, out.stderr


def test_nothing_is_ever_left_by_a_refusal_of_the_script(house, tree, patches):
    apply(tree, [patches["alpha"]])
    core = tree.root / "v1" / "core.py"
    core.write_bytes(core.read_bytes().replace(b"import sys", b"import abc"))
    before = snapshot(tree.root)
    for action in ("--apply", "--revert", "--check", "--diff"):
        out = script(house, action, "--target", str(tree.root))
        assert out.returncode == 1
        assert "v1/core.py: block alpha:b3 was edited by hand" in out.stderr
    assert snapshot(tree.root) == before
