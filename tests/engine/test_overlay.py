# SPDX-License-Identifier: Apache-2.0
"""Overlays of patches for processes with vLLM, which keeps every byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtax import patcher
from kvtax.engine import preflight
from kvtax.engine.environment import (
    NULL_MODEL_NAME,
    NULL_MODEL_PLUGIN,
    engine_environment,
)
from kvtax.engine.installation import Installation, installation
from kvtax.engine.null_model import CPU_ENGINE, Forward, write_null_model
from kvtax.engine.overlay import build_overlay
from kvtax.patcher.at_import import SOURCES
from kvtax.patcher.import_finder import MODULES
from kvtax.paths import PATCHES
from kvtax.proc.ports import reserve
from tests.releases import package_of

SHORT_CIRCUIT = "mooncake_get_finished_short_circuit"


@pytest.mark.slow
def test_hashes_are_those_of_the_patches_that_the_release_needs(tmp_path):
    release = package_of("0.18.1")
    names = [SHORT_CIRCUIT, "nixl_cpu_layout"]
    hashes = build_overlay(tmp_path / "o", names, {"DELAY_US": 1}, vllm=release)
    assert hashes == {
        SHORT_CIRCUIT: patcher.load_patches(PATCHES)[SHORT_CIRCUIT].sha256
    }
    (line,) = (tmp_path / "o" / MODULES).read_text().splitlines()
    assert line.split()[0].endswith("v1.mooncake.mooncake_connector")


def test_an_unknown_patch_is_refused_and_no_folder_is_made(tmp_path):
    with pytest.raises(patcher.BlockPatchError, match=SHORT_CIRCUIT):
        build_overlay(tmp_path / "o", ["no_such_patch"], {})
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_other_packages_than_vllm_are_patched_too(tmp_path):
    overlay = tmp_path / "o"
    try:
        build_overlay(overlay, ["nixl_progress_delay"], {"DELAY_US": 7})
    except ModuleNotFoundError:
        pytest.skip("nixl is not installed")
    ports = reserve(1)[0]
    env = engine_environment(overlay, CPU_ENGINE, ports)
    (package,) = (path.name for path in (overlay / SOURCES).iterdir())
    script = f"import {package}._api as api; print(api.__loader__.patched)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(overlay / SOURCES / package / "_api.py")


@pytest.mark.parametrize(
    ("inherited", "given"),
    [
        (None, None),
        ("", "kvtax_null_model"),
        ("theirs,another", "theirs,another,kvtax_null_model"),
    ],
)
def test_a_list_of_plugins_that_is_inherited_gets_the_null_model(
    inherited, given, monkeypatch
):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if inherited is not None:
        monkeypatch.setenv("VLLM_PLUGINS", inherited)
    env = engine_environment(None, CPU_ENGINE, reserve(1)[0])
    assert env.get("VLLM_PLUGINS") == given
    (declared,) = NULL_MODEL_PLUGIN.glob("*/entry_points.txt")
    assert f"\n{NULL_MODEL_NAME} = " in declared.read_text()


@pytest.fixture
def theirs(tmp_path) -> Installation:
    """A Python of a user whose vLLM has no bytecode, as uv installs it."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix, 'bin')}\n")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    server = venv / "lib" / version / "site-packages" / "vllm/entrypoints/openai"
    server.mkdir(parents=True)
    (server / "api_server.py").write_text("")
    for folder in (server, *list(server.parents)[:2]):
        (folder / "__init__.py").write_text("")
    return installation(str(venv / "bin" / "python"))


@pytest.mark.slow
def test_bytecode_that_a_users_packages_lack_is_made_once_and_elsewhere(
    theirs, tmp_path, monkeypatch
):
    monkeypatch.setattr(preflight, "cpu_preload", lambda _: [])
    before = sorted(Path(theirs.prefix).rglob("*"))
    checked = preflight.check_import(tmp_path, CPU_ENGINE, theirs)
    assert sorted(Path(theirs.prefix).rglob("*")) == before
    assert checked.bytecode == str(tmp_path / "bytecode")
    assert [*(tmp_path / "bytecode").rglob("api_server.*.pyc")]
    monkeypatch.setattr("kvtax.engine.environment.cpu_preload", lambda _: [])
    env = engine_environment(None, CPU_ENGINE, reserve(1)[0], checked)
    script = "import vllm; print(vllm.__spec__.cached)"
    command = checked.command("-c", script)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(checked.bytecode)


@pytest.mark.slow
def test_a_vllm_that_cannot_be_imported_is_refused_with_its_own_words(
    theirs, tmp_path, monkeypatch
):
    monkeypatch.setattr(preflight, "cpu_preload", lambda _: [])
    (theirs.package("vllm") / "__init__.py").write_text("import no_such_library")
    with pytest.raises(preflight.PreflightError, match="no_such_library"):
        preflight.check_import(tmp_path, CPU_ENGINE, theirs)


def test_who_reads_while_it_is_made_again_reads_it_whole(tmp_path: Path) -> None:
    """Each run of an experiment makes it, and servers of others are starting then."""
    folder = tmp_path / "model"
    write_null_model(folder, 4096, Forward(0))
    enough = threading.Event()

    def make_again() -> None:
        while not enough.is_set():
            write_null_model(folder, 4096, Forward(0))

    writer = threading.Thread(target=make_again)
    writer.start()
    try:
        for _ in range(200):
            read = json.loads((folder / "config.json").read_text())
            assert read["max_position_embeddings"] == 4096
    finally:
        enough.set()
        writer.join()
