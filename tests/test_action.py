# SPDX-License-Identifier: Apache-2.0
"""action.yml does what a runner of GitHub is meant to do with it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from kvtax.cli import COMMANDS, _parser
from kvtax.paths import REPOSITORY

ACTION = yaml.safe_load((REPOSITORY / "action.yml").read_text())
STEPS = ACTION["runs"]["steps"]
SCRIPTS = {step["name"]: step for step in STEPS if "run" in step}
LATEST = ACTION["inputs"]["vllm"]["default"]
RECORD = '#!/bin/bash\nprintf "%s\\n" "$(basename "$0")" "$@" >>"$CALLS"\n'


def run_step(
    name: str, folder: Path, **inputs: str
) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Run a step as a runner does; return also the arguments of each stubbed program.

    What an expression says is filled in from `inputs` and the action's defaults.
    """
    given = {
        key: given_input.get("default", "")
        for key, given_input in ACTION["inputs"].items()
    }
    given |= {key.replace("_", "-"): value for key, value in inputs.items()}
    contexts = {f"inputs.{key}": value for key, value in given.items()}
    contexts |= {"github.action_path": str(REPOSITORY), "runner.temp": str(folder)}
    for program in ("bin/uv", "bin/sudo", "kvtax/bin/kvtax"):
        file = folder / program
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(RECORD)
        file.chmod(0o755)
    script = folder / "step.sh"
    script.write_text(SCRIPTS[name]["run"])
    env = {
        key: re.sub(r"\$\{\{ (.+?) \}\}", lambda match: contexts[match[1]], str(value))
        for key, value in SCRIPTS[name]["env"].items()
    }
    env |= {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("step", SCRIPTS.values(), ids=SCRIPTS)
def test_each_script_is_bash_and_has_its_inputs_from_the_environment(step):
    assert step["shell"] == "bash"
    parsed = subprocess.run(["bash", "-n"], input=step["run"], text=True)
    assert parsed.returncode == 0
    # An expression in a script would be code of whoever wrote the input.
    assert "${{" not in step["run"]


def test_the_inputs_that_are_used_are_those_that_are_declared_and_described():
    text = (REPOSITORY / "action.yml").read_text()
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(ACTION["inputs"])
    assert all(declared["description"] for declared in ACTION["inputs"].values())
    required = [
        key for key, declared in ACTION["inputs"].items() if declared.get("required")
    ]
    assert required == ["connector"]
    page = (REPOSITORY / "docs" / "gate.md").read_text()
    assert all(f"{name}: " in page for name in required)
    outputs = set(re.findall(r'echo "(\w+)=', SCRIPTS["measure"]["run"]))
    assert outputs == set(ACTION["outputs"])


def test_the_gate_gets_what_was_given_to_the_letter(tmp_path):
    config = '{"kv_role": "kv_both", "a": "it\'s $HOME"}'
    (tmp_path / "old cell.json").write_text("{}")
    done, calls = run_step(
        "measure",
        tmp_path,
        connector="mypkg.kv:MyConnector",
        connector_config=config,
        limits="my limits.toml",
        since="old cell.json",
    )
    assert done.returncode == 0, done.stderr
    parsed = vars(_parser(["gate"], COMMANDS).parse_args(calls[1:]))
    assert parsed["connector"] == "mypkg.kv:MyConnector"
    assert parsed["connector_config"] == config
    assert parsed["limits"] == Path("my limits.toml")
    assert parsed["since"] == Path("old cell.json")
    assert parsed["summary"] == tmp_path / "summary.md"
    output = (tmp_path / "output").read_text()
    assert f"cell={parsed['out']}\n" in output
    assert f"junit={parsed['junit']}\n" in output


@pytest.mark.parametrize("since", ["", "cell-of-main.json"])
def test_empty_inputs_and_a_first_run_give_no_options(since, tmp_path):
    done, calls = run_step("measure", tmp_path, connector="Mine", since=since)
    assert done.returncode == 0, done.stderr
    parsed = vars(_parser(["gate"], COMMANDS).parse_args(calls[1:]))
    absent = [parsed[name] for name in ("connector_config", "limits", "since")]
    assert absent == [None, None, None]


def test_a_broken_limit_is_the_status_of_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_action.RECORD", "#!/bin/bash\nexit 1\n")
    done, _ = run_step("measure", tmp_path, connector="Mine")
    assert done.returncode == 1


def test_vllm_is_installed_from_its_lock_with_what_the_connector_needs(tmp_path):
    done, calls = run_step("install", tmp_path, install=". numpy>=2")
    assert done.returncode == 0, done.stderr
    assert str(REPOSITORY / f"locks/releases/{LATEST}.txt") in calls
    assert calls[-3:] == [str(REPOSITORY), ".", "numpy>=2"]


@pytest.mark.parametrize("vllm", ["0.1", "", "../../../x", "0.32.0/../0.32.0", "$(x)"])
def test_a_release_without_a_lock_is_named_before_anything_is_installed(tmp_path, vllm):
    (tmp_path / "x.txt").write_text("evil==1\n")
    done, calls = run_step("install", tmp_path, vllm=vllm)
    assert (done.returncode, calls) == (2, [])
    assert f"no lock for vLLM {vllm}" in done.stdout


def test_packages_are_words_and_no_patterns(tmp_path):
    (tmp_path / "evil.whl").touch()
    _, calls = run_step("install", tmp_path, install="*.whl $(touch pwned)")
    assert calls[-3:] == ["*.whl", "$(touch", "pwned)"]
    assert not (tmp_path / "pwned").exists()


def test_nothing_that_moves_is_used():
    """An action of others by its tag could be another tomorrow."""
    text = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    uses = [step["uses"] for step in STEPS if "uses" in step]
    uses += re.findall(r"uses: (\S+)", text)
    assert all(re.search(r"@[0-9a-f]{40}$", name) for name in uses)
