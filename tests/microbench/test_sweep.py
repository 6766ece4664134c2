# SPDX-License-Identifier: Apache-2.0
"""What a sweep refuses, and what it does not let one bad config spoil."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import blockpatch
from lab.config import ConfigError
from lab.paths import CONFIGS, PATCHES, REPOSITORY
from lab.serving.connector import Connector, load_connector
from lab.serving.installation import installation
from lab.serving.machine_lock import MachineBusy, machine_lock
from lab.serving.tree import build_tree, link_package
from microbench.profile import load_profile
from microbench.trees import build_trees
from microbench.trial import PlannedTrial
from microbench.workshop import Workshop

pytestmark = pytest.mark.slow

PROFILES = sorted(file.stem for file in (CONFIGS / "profiles").glob("*.toml"))
CONNECTORS = sorted(file.stem for file in (CONFIGS / "connectors").glob("*.toml"))

LOCK_DEADLINE_S = 300.0


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "microbench.sweep", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def trees(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    link_package(installation().package("vllm"), folder / "base")
    return folder


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_names_configs_that_exist(name):
    for config in load_profile(name).configs:
        load_connector(config)


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_fills_its_cache_within_one_lifetime(name):
    profile = load_profile(name)
    plan = profile.plan("model", vocab_size=1000, seed=0)
    tokens = plan.prompt_tokens + plan.output_tokens - 1
    growth = plan.phases[0].requests * (tokens // profile.block_size)
    assert growth >= profile.num_blocks
    assert tokens < profile.max_model_len


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_full_profiles_reach_the_reference_studys_cache_size(name):
    assert load_profile(name).num_blocks > 17_500


@pytest.mark.parametrize("name", CONNECTORS)
def test_every_config_can_be_built_and_leaves_the_installed_package_alone(
    name, trees, tmp_path
):
    target = installation().package("vllm") / "v1/core/sched/scheduler.py"
    before = target.read_bytes()
    connector = load_connector(name)
    hashes = build_tree(
        tmp_path / "tree",
        trees / "base" / "vllm",
        connector.patches,
        connector.patch_parameters,
    )
    patches = blockpatch.load_patches(PATCHES)
    release = blockpatch.Tree(trees / "base" / "vllm").version
    assert list(hashes) == [
        patch
        for patch in connector.patches
        if patches[patch].package != "vllm" or patches[patch].is_needed(release)
    ]
    patched = tmp_path / "tree" / "vllm/v1/core/sched/scheduler.py"
    assert b"BLOCK_BEGIN step_timing_v1" in patched.read_bytes()
    assert target.read_bytes() == before


def test_configs_alternate_the_direction_so_that_drift_hits_all_alike():
    ready = {name: PlannedTrial(name, 0, Connector("", []), {}) for name in "abc"}
    for repeat, order in ((0, "abc"), (1, "cba")):
        planned = Workshop(Path(), None, ready).round(repeat)
        assert [(one.config, one.repeat) for one in planned] == [
            (name, repeat) for name in order
        ]


def test_a_config_whose_patch_does_not_fit_does_not_sink_the_others(trees, tmp_path):
    base = tmp_path / "base" / "vllm"
    link_package(trees / "base" / "vllm", base.parent)
    connector_file = base / (
        "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
    )
    changed = connector_file.read_text().replace("return meta", "return (meta, 1)")
    connector_file.unlink()
    connector_file.write_text(changed)
    configs = {
        name: load_connector(name) for name in ("noop", "mooncake_both_hash_sync")
    }
    patches, errors = build_trees(tmp_path, configs, installation())
    assert set(patches) == {"noop"}
    assert "return meta" in errors["mooncake_both_hash_sync"]


def test_an_unknown_config_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="nixl_both"):
        load_connector("nixl")


def test_a_misspelt_field_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "connectors").mkdir()
    text = (CONFIGS / "connectors" / "noop.toml").read_text()
    file = tmp_path / "connectors" / "noop.toml"
    file.write_text(text.replace("summary", "sumary"))
    monkeypatch.setattr("lab.serving.connector.CONFIGS", tmp_path)
    with pytest.raises(ConfigError, match=r"noop\.toml.*sumary"):
        load_connector("noop")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "nothing"], "cpu-smoke"),
        (["--only", "nothing"], "nixl_both"),
        (["--repeats", "0"], "at least 1"),
        (["--model", "/tmp"], "no use for --model"),
        (["--resume"], "a run to resume"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(
    arguments, message, tmp_path
):
    done = run("--out", str(tmp_path / "run"), *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


@contextmanager
def machine_held() -> Iterator[None]:
    """By us, as soon as nobody else has it: another checkout may be measuring."""
    deadline_s = time.monotonic() + LOCK_DEADLINE_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(machine_lock())
                break
            except MachineBusy:
                assert time.monotonic() < deadline_s, "the machine is held by others"
                time.sleep(0.1)
        yield


def test_a_second_sweep_on_the_same_machine_is_refused(tmp_path):
    with machine_held():
        done = run("--out", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "another sweep or experiment is running" in done.stderr


def test_the_tree_shares_its_data_with_the_installed_package(trees):
    original = installation().package("vllm") / "envs.py"
    assert os.stat(original).st_ino == os.stat(trees / "base/vllm/envs.py").st_ino
