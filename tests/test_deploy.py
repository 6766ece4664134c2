# SPDX-License-Identifier: Apache-2.0
"""deploy/ adds the recorder to a vLLM on Kubernetes, and nothing else."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve
from tests.look.made_up_server import served
from tests.proc.living import eventually

FOLDER = REPOSITORY / "deploy"
CONTAINERFILE = (FOLDER / "Containerfile").read_text()
PARTS = yaml.safe_load((FOLDER / "recorder.yaml").read_text())
# As in vLLM's guide to Kubernetes, with an init container and a root that is read-only.
DEPLOYMENT = yaml.safe_load("""
apiVersion: apps/v1
kind: Deployment
metadata: {name: vllm, labels: {app: vllm}}
spec:
  replicas: 2
  selector: {matchLabels: {app: vllm}}
  template:
    metadata: {labels: {app: vllm}}
    spec:
      securityContext: {runAsUser: 1000, runAsNonRoot: true}
      initContainers:
      - {name: model, image: "fetch:1", command: [fetch, /models]}
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.18.1
        args: [--model, /models/it, --kv-transfer-config, '{"kv_role": "kv_both"}']
        env:
        - {name: HF_HOME, value: /models}
        ports: [{containerPort: 8000}]
        resources: {limits: {nvidia.com/gpu: "1"}}
        readinessProbe: {httpGet: {path: /health, port: 8000}}
        securityContext: {readOnlyRootFilesystem: true}
        volumeMounts:
        - {name: models, mountPath: /models}
        - {name: shm, mountPath: /dev/shm}
      volumes:
      - {name: models, persistentVolumeClaim: {claimName: models}}
      - {name: shm, emptyDir: {medium: Memory}}
""")
# Leader and worker have their own containers, and the worker little else.
LEADER_WORKER_SET = yaml.safe_load("""
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: vllm}
spec:
  replicas: 1
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      metadata: {labels: {role: leader}}
      spec:
        initContainers:
        - {name: model, image: "fetch:1", command: [fetch, /models]}
        containers:
        - name: vllm-leader
          image: vllm/vllm-openai:v0.32.0
          args: [serve, /models/it, --pipeline-parallel-size, "2"]
          env: [{name: HF_HOME, value: /models}]
          volumeMounts: [{name: shm, mountPath: /dev/shm}]
        - {name: other, image: "other:1"}
        volumes: [{name: shm, emptyDir: {medium: Memory}}]
    workerTemplate:
      spec:
        containers:
        - {name: vllm-worker, image: "vllm/vllm-openai:v0.32.0", command: [ray, start]}
""")
# The oldest and the newest whose schemas kubernetes-validate has.
VERSIONS = ("1.25", "1.37")
# Starts of vLLM's container, with so many workers, in the life of one pod.
STARTS, WORKERS = 4, 8
GIB, MB = 2**30, 10**6


def merge(original: Any, patch: Any, key: str = "name") -> Any:
    """Merge as Kubernetes does: lists of objects by a key. Nothing can be deleted."""
    if isinstance(patch, dict) and isinstance(original, dict):
        keys = {"volumeMounts": "mountPath"}
        return original | {
            name: merge(original.get(name), value, keys.get(name, "name"))
            for name, value in patch.items()
        }
    if isinstance(patch, list) and isinstance(original, list):
        rest = {item[key]: item for item in original}
        items = [merge(rest.pop(item[key], None), item) for item in patch]
        return items + list(rest.values())
    return patch


def without_order(value: Any) -> Any:
    """Sort all lists, as far down as they go."""
    if isinstance(value, dict):
        return {key: without_order(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return sorted(
            map(without_order, value), key=partial(json.dumps, sort_keys=True)
        )
    return value


PROBE, LOOK = PARTS["init"], PARTS["look"]
USER = "65534"
RECORDS = {"env": list(PARTS["env"].values())}
RECORDS |= {"volumeMounts": list(PARTS["mounts"].values())}
VOLUMES = list(PARTS["volumes"].values())
ENV = {variable["name"]: variable["value"] for variable in RECORDS["env"]}


def recorded(pod: Any, container: str) -> Any:
    """Add the recorder to the spec of a pod."""
    added = {
        "initContainers": [PROBE],
        "containers": [RECORDS | {"name": container}, LOOK],
        "volumes": VOLUMES,
    }
    return merge(pod, added)


PATCHED = copy.deepcopy(DEPLOYMENT)
PATCHED["spec"]["template"]["spec"] = recorded(
    DEPLOYMENT["spec"]["template"]["spec"], "vllm"
)


def mounts(container: dict) -> dict[str, str]:
    """Return the path of each volume in a container."""
    return {place["name"]: place["mountPath"] for place in container["volumeMounts"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_the_patched_deployment(version):
    assert kubernetes_validate.validate(PATCHED, version, strict=True)


needs_kustomize = pytest.mark.skipif(
    not shutil.which("kubectl") and "KVTAX_CI" not in os.environ,
    reason="kubectl has kustomize",
)


def built(folder: Path, manifest: Any, components: dict[str, list[str]]) -> Any:
    """Build a manifest with kustomize.

    `components` are their settings by folder. Raises CalledProcessError.
    """
    (folder / "vllm.yaml").write_text(yaml.safe_dump(manifest))
    for name, settings in components.items():
        made_by = ["sh", str(FOLDER / "component.sh"), *settings, str(folder / name)]
        subprocess.run(made_by, check=True)
    text = {"resources": ["vllm.yaml"], "components": list(components)}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return yaml.safe_load(done.stdout)


@needs_kustomize
@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_the_component_only_adds_and_leaves_nothing_when_it_is_deleted(kind, tmp_path):
    manifest = DEPLOYMENT | {"kind": kind}
    done = built(tmp_path, manifest, {"recorder": [kind, "vllm", "vllm", USER]})
    assert without_order(done) == without_order(PATCHED | {"kind": kind})
    assert built(tmp_path, manifest, {}) == manifest


ROLES = ("leader", "worker")


@pytest.mark.slow
@needs_kustomize
@pytest.mark.parametrize("roles", [ROLES, ["worker"]])
def test_pods_of_a_leader_worker_set_keep_what_they_had_and_record(roles, tmp_path):
    manifest = copy.deepcopy(LEADER_WORKER_SET)
    before = manifest["spec"]["leaderWorkerTemplate"]
    for role in set(ROLES) - set(roles):
        del before[f"{role}Template"]
    settings = {
        role: [f"LeaderWorkerSet/{role}", "vllm", f"vllm-{role}", USER]
        for role in roles
    }
    done = built(tmp_path, manifest, settings)
    after = done["spec"]["leaderWorkerTemplate"]
    for role in roles:
        new = after[f"{role}Template"]["spec"]
        wanted = recorded(before[f"{role}Template"]["spec"], f"vllm-{role}")
        assert without_order(new) == without_order(wanted)
        for version in VERSIONS:
            pod = {"template": {"metadata": {"labels": {"app": "vllm"}}, "spec": new}}
            checked = DEPLOYMENT | {"spec": DEPLOYMENT["spec"] | pod}
            assert kubernetes_validate.validate(checked, version, strict=True)
        kept = after[f"{role}Template"] | {"spec": None}
        assert kept == before[f"{role}Template"] | {"spec": None}
    assert after["size"] == before["size"]
    assert built(tmp_path, manifest, {}) == manifest


@needs_kustomize
@pytest.mark.parametrize(
    ("manifest", "settings", "named"),
    [
        (DEPLOYMENT, ["Deployment", "vllm", "other", USER], "other"),
        (DEPLOYMENT, ["Deployment", "other", "vllm", USER], "other"),
        (DEPLOYMENT, ["StatefulSet", "vllm", "vllm", USER], "StatefulSet"),
        (
            LEADER_WORKER_SET,
            ["LeaderWorkerSet/leader", "vllm", "vllm", USER],
            "name=vllm]",
        ),
    ],
)
def test_a_workload_or_a_container_that_is_not_there_ends_the_build_by_name(
    manifest, settings, named, tmp_path
):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        built(tmp_path, manifest, {"recorder": settings})
    assert named in failed.value.stderr


@pytest.mark.parametrize(
    "settings",
    [
        ["Deployment", "vllm"],
        ["Deployment", "vllm", "vllm"],
        ["Job", "vllm", "vllm", USER],
        ["LeaderWorkerSet", "vllm", "vllm", USER],
        ["Deployment", "vllm", "a b", USER],
        ["Deployment", "", "vllm", USER],
        ["Deployment", "vllm", "vllm", "root"],
    ],
)
def test_wrong_settings_are_refused_and_nothing_is_written(settings, tmp_path):
    command = ["sh", str(FOLDER / "component.sh"), *settings, str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("user", [0, 1_000])
def test_the_sidecar_runs_as_vllms_user_who_alone_can_read_records(user, tmp_path):
    settings = ["Deployment", "vllm", "vllm", str(user), str(tmp_path / "made")]
    subprocess.run(["sh", str(FOLDER / "component.sh"), *settings], check=True)
    made = yaml.safe_load((tmp_path / "made" / "recorder.yaml").read_text())
    context = made["look"]["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (user, user != 0)
    assert made["init"] == PROBE


@pytest.mark.parametrize("container", [PROBE, LOOK], ids=["probe", "look"])
def test_our_containers_fit_the_restricted_pod_security_standard(container):
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": int(USER),
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    # Else a pod would lose the class Guaranteed, and its CPUs of its own.
    assert container["resources"]["limits"] == container["resources"]["requests"]


def test_the_images_are_those_of_the_containerfile():
    built = re.findall(r"--target (\w+) -t (\S+) \.$", CONTAINERFILE, re.MULTILINE)
    assert dict(built) == {"probe": PROBE["image"], "look": LOOK["image"]}
    for target in ("probe", "look"):
        stage = lines_of(target)
        # Kubernetes can only see that a user is not root if it is a number.
        assert stage[-1] == ["USER", "65534:65534"]


def test_the_guide_builds_and_scrapes_what_the_manifest_names():
    guide = (REPOSITORY / "docs" / "operate.md").read_text()
    for command in re.findall(r"docker build .*", CONTAINERFILE):
        assert command in guide
    (port,) = LOOK["ports"]
    assert f"podMetricsEndpoints: [{{port: {port['name']}}}]" in guide


def test_vllm_and_the_sidecar_mean_the_same_folder_of_records():
    assert mounts(RECORDS)["kvtax-records"] == ENV["KVTAX_STEP_RECORDS_DIR"]
    assert mounts(LOOK)["kvtax-records"] in LOOK["command"]
    assert mounts(PROBE)["kvtax-probe"] == mounts(RECORDS)["kvtax-probe"]
    assert mounts(RECORDS)["kvtax-probe"] == ENV["PYTHONPATH"]


def test_the_recorder_reads_each_variable():
    sources = [path.read_text() for path in (REPOSITORY / "probe").rglob("*.py")]
    for name in ENV.keys() - {"PYTHONPATH"}:
        assert any(f'"{name}"' in source for source in sources), name


def test_the_volume_holds_the_records_of_several_starts():
    """Kubernetes evicts a pod whose records outgrow the volume."""
    (limit,) = (
        volume["emptyDir"]["sizeLimit"]
        for volume in VOLUMES
        if volume["name"] == "kvtax-records"
    )
    files = len(("engine_step", "engine_request", "threads")) + WORKERS
    most = STARTS * files * int(ENV["KVTAX_STEP_RECORDS_MAX_MB"]) * MB
    assert most < int(limit.removesuffix("Gi")) * GIB


def lines_of(target: str) -> list[list[str]]:
    """Split the lines of a stage of the Containerfile into words."""
    _, stage = re.split(rf"^FROM .* AS {target}$", CONTAINERFILE, flags=re.MULTILINE)
    stage, *_ = re.split(r"^FROM ", stage, flags=re.MULTILINE)
    lines = map(shlex.split, stage.splitlines())
    return [words for words in lines if words and words[0] != "#"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The folder in which the stage `build` has run, with it in place of /."""
    root = tmp_path_factory.mktemp("image")
    folder = root
    for instruction, *words in lines_of("build"):
        if instruction == "WORKDIR":
            folder = root / words[0].lstrip("/")
            folder.mkdir()
        elif instruction == "COPY":
            *sources, target = words
            for source in sources:
                if (REPOSITORY / source).is_dir():
                    shutil.copytree(REPOSITORY / source, folder / target)
                else:
                    shutil.copy(REPOSITORY / source, folder / target)
        else:
            assert (instruction, words[0]) == ("RUN", "pip")
            paths = [f"{root}{word}" if word[0] == "/" else word for word in words]
            command = [sys.executable, "-m", *paths]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return root


@pytest.fixture
def copied(root, tmp_path) -> Path:
    """The volume after two runs of the init container, as after a node's restart."""
    program, *command = PROBE["command"]
    assert ["COPY", program, program] == [
        word for word in lines_of("probe")[0] if not word.startswith("--")
    ]
    volume = mounts(PROBE)["kvtax-probe"]
    (tmp_path / volume[1:]).mkdir(parents=True)
    where = {"/probe/.": f"{root}/probe/.", volume: f"{tmp_path}{volume}"}
    for _ in range(2):
        subprocess.run([where.get(word, word) for word in command], check=True)
    return tmp_path / volume[1:]


@pytest.mark.slow
def test_the_image_holds_the_recorder_and_nothing_else(copied, root):
    sources = [words[-2] for words in lines_of("probe") if words[0] == "COPY"]
    assert sources == ["/bin/busybox", "/probe"]
    info = "kvtax_probe-0.1.0.dist-info"
    assert {path.name for path in copied.iterdir()} == {"kvtax_probe", info}
    package = REPOSITORY / "probe" / "kvtax_probe"
    assert {
        path.relative_to(copied / "kvtax_probe"): path.read_bytes()
        for path in (copied / "kvtax_probe").rglob("*")
    } == {
        path.relative_to(package): path.read_bytes()
        for path in package.iterdir()
        if path.is_file()
    }


@pytest.mark.slow
def test_vllm_loads_the_recorder_from_the_volume(copied, tmp_path):
    script = (
        "import sys; from vllm.plugins import load_general_plugins; "
        "load_general_plugins(); import kvtax_probe; print(kvtax_probe.__file__, "
        "any(type(f).__name__ == '_OnImport' for f in sys.meta_path))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | ENV | {"PYTHONPATH": str(copied)},
        capture_output=True,
        text=True,
        check=True,
    )
    last = done.stdout.splitlines()[-1]
    assert last == f"{copied}/kvtax_probe/__init__.py True"


@pytest.mark.slow
def test_the_sources_in_the_image_make_the_whole_wheel(root):
    (wheel,) = (root / "wheel").glob("kvtax-*.whl")
    command = ["git", "ls-files", "kvtax"]
    tracked = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(tracked.stdout.split()) <= names
    assert "kvtax/data/probe/kvtax_probe/engine.py" in names


@pytest.mark.slow
def test_the_sidecar_serves_what_comes_and_ends_with_the_pod(tmp_path):
    """It starts before vLLM has written anything."""
    (port,) = (port["containerPort"] for port in LOOK["ports"])
    other = reserve(1)[0].http
    records = tmp_path / "records"
    records.mkdir()
    words = {"/records": str(records), f"$(POD_IP):{port}": f"127.0.0.1:{other}"}
    assert words.keys() <= set(LOOK["command"])
    program, *arguments = (words.get(word, word) for word in LOOK["command"])
    command = [sys.executable, "-m", program, *arguments]
    sidecar = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        eventually(lambda: metrics(other) is not None)
        assert "step_seconds_count{" not in metrics(other)
        served(records / "life", steps=30).write()
        assert 'kvtax:step_seconds_count{instance_name="life"} 30.0' in metrics(other)
        sidecar.terminate()
        assert sidecar.wait(120) == 143
    finally:
        sidecar.kill()


def metrics(port: int) -> str | None:
    """Scrape; None if nothing answers."""
    url = f"http://127.0.0.1:{port}/metrics"
    with suppress(OSError), urllib.request.urlopen(url, timeout=120) as answer:
        return answer.read().decode()
    return None
