# SPDX-License-Identifier: Apache-2.0
"""What docs/hosts/ starts clusters with says what a cluster must be told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fleet.tests.simulate.two_arms import two_arms
from kvtax.hosts import MEASURES
from kvtax.paths import REPOSITORY

FOLDER = REPOSITORY / "docs" / "hosts"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
SLURM = FOLDER / "slurm.sh"
KUBERAY = FOLDER / "kuberay.yaml"
NEEDED = {"RAY_worker_niceness": "0"}
# What Slurm would do, on one node.
STUBS = {
    "scontrol": "#!/bin/sh\necho 127.0.0.1\n",
    "srun": '#!/bin/sh\nshift\nexec "$@"\n',
}
# `ray stop` ends all that is Ray's, so it must see nobody else's.
ALONE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
DEADLINE_S = 300


def groups() -> Iterator[dict]:
    spec = yaml.safe_load(KUBERAY.read_text())["spec"]
    yield spec["headGroupSpec"]
    yield from spec["workerGroupSpecs"]


def test_every_host_on_kubernetes_has_what_a_measurement_needs():
    for group in groups():
        (container,) = group["template"]["spec"]["containers"]
        told = {one["name"]: one.get("value") for one in container["env"]}
        assert told == NEEDED | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": None}
        token = container["env"][-1]["valueFrom"]["secretKeyRef"]
        create = f"create secret generic {token['name']} --from-literal={token['key']}="
        assert create in KUBERAY.read_text()
        assert container["resources"]["limits"] == container["resources"]["requests"]


@pytest.mark.slow
def test_ray_on_kubernetes_is_the_locked_one_and_knows_its_flags():
    version = yaml.safe_load(KUBERAY.read_text())["spec"]["rayVersion"]
    lock = (REPOSITORY / "locks" / "cpu.txt").read_text()
    assert re.search(rf"^ray=={re.escape(version)} ", lock, flags=re.MULTILINE)
    asking = [str(Path(sys.executable).with_name("ray")), "start", "--help"]
    told = subprocess.run(asking, capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"--[\w-]+", told))
    for group in groups():
        assert {f"--{name}" for name in group["rayStartParams"]} <= known


def test_every_host_on_kubernetes_measures_one_task_at_a_time():
    for group in groups():
        resources = json.loads(group["rayStartParams"]["resources"])
        assert json.loads(resources) == {MEASURES: 1}


def test_the_image_has_the_checkout_where_the_cluster_looks_for_it():
    assert "COPY . /kvtax" in DOCKERFILE
    assert "PATH=/kvtax/.venv/bin:" in DOCKERFILE


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_the_commands_that_a_file_names_exist(file):
    text = file.read_text()
    for named in re.findall(r"docs/hosts/[\w.]+", text):
        assert (REPOSITORY / named).exists()
    asking = [sys.executable, "-m", "kvtax", "sweep", "--help"]
    known = subprocess.run(asking, cwd=REPOSITORY, capture_output=True, text=True)
    for command in re.findall(r"^#.*bash run_all\.sh (.*)$", text, re.MULTILINE):
        assert set(re.findall(r"--[\w-]+", command)) <= set(
            re.findall(r"--[\w-]+", known.stdout)
        )


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="networks of its own need root")
def test_the_slurm_script_runs_a_command_on_its_cluster_and_ends_it(tmp_path: Path):
    """Of Slurm alone there are stand-ins."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    config = tmp_path / "two_arms.toml"
    config.write_text(two_arms([1], repeats=1))
    out = tmp_path / "run"
    command = ["python", "-m", "kvtax", "fleet", str(config), "--virtual"]
    script = f'ip link set lo up && bash {SLURM} "$@"; status=$?; ps ax; exit $status'
    slurm = {
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_JOB_NODELIST": "one",
        "SLURM_JOB_NUM_NODES": "1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    # Ray's sockets are below it, and their names must be short.
    with tempfile.TemporaryDirectory(prefix="kvh", ignore_cleanup_errors=True) as made:
        done = subprocess.run(
            [*ALONE, "sh", "-c", script, "sh", *command, "--out", str(out)],
            env=os.environ | slurm | {"TMPDIR": made},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(out.glob("*/r0/arm.json"))) == 2
    assert "asks for no token" not in done.stderr
    assert "raylet" not in done.stdout.rpartition("PID")[2]
