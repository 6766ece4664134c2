# SPDX-License-Identifier: Apache-2.0
"""The GPU's session runs where PyTorch is alone, goes on, and claims no noise."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import numpy as np
import pytest

from kvtax.paths import REPOSITORY
from kvtax.stats import Estimate
from studies.gpu import pack, session, stand_ins

SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
# A network of its own, with loopback alone; and processes of its own.
APART = ["unshare", "-n", "-p", "--fork", "--mount-proc", "--kill-child"]
LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
request = struct.pack("16sh", b"lo", 0x1 | 0x40)
fcntl.ioctl(socket.socket(), 0x8914, request)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_an_interval_of_servers_holds_the_next_servers_difference():
    means = {"plain": np.array([10.0, 10.2]), "walk": np.array([10.4, 10.6])}
    both = session.added("walk", means)
    assert both.value == pytest.approx(0.4)
    # t of 2 degrees of freedom, 4.303, times the error of a difference of two means.
    assert both.ci95[1] - both.value == pytest.approx(4.303 * 0.1414, rel=0.01)
    alone = session.added("noop", means | {"noop": np.array([9.0])})
    assert alone.ci95[0] < -1.1 < alone.value < alone.ci95[1] < 0.5
    assert session.added("walk", {"walk": means["walk"]}) is None
    single = {name: values[:1] for name, values in means.items()}
    assert session.added("walk", single).ci95 is None


def test_two_servers_of_a_noisy_machine_differ_from_no_other_for_certain():
    """Of servers that draw from the same spread, one in twenty at most stands out."""
    rng, certain = np.random.default_rng(1), 0
    for _ in range(2_000):
        means = {name: rng.normal(9.5, 0.5, 2) for name in ("plain", "walk")}
        means["noop"] = rng.normal(9.5, 0.5, 1)
        low, high = session.added("noop", means).ci95
        certain += low > 0 or high < 0
    assert certain < 0.07 * 2_000


@pytest.mark.parametrize(
    ("config", "interval", "outcome"),
    [
        (session.WALK, (0.1, 0.5), "confirmed"),
        (session.WALK, (-0.1, 0.1), "refuted"),
        (session.WALK, (-0.1, 0.5), "open"),
        ("noop", (-0.3, 0.1), "confirmed"),
        ("noop", (0.2, 0.4), "refuted"),
        ("noop", (-0.3, 0.3), "open"),
        ("noop", None, ""),
    ],
)
def test_the_registered_claim_is_confirmed_refuted_or_open(config, interval, outcome):
    some = Estimate(1.0, (1.0, 1.0))
    row = session.Row(config, 1, 7, some, some, 9.0, Estimate(0.2, interval))
    assert row.outcome == outcome


def finished(out: Path, config: str, repeat: int, text: str = "") -> Path:
    server = out / config / f"r{repeat}"
    (server / "records").mkdir(parents=True)
    (server / "records" / "steps.jsonl").write_text(text)
    (server / "trial.json").write_text(json.dumps({"status": "ok"}))
    return server


def test_what_was_packed_is_brought_back_and_replaces_nothing(tmp_path):
    first, second, packed = (tmp_path / name for name in ("a", "b", "packed"))
    finished(first, "plain", 1, "first")
    finished(first, session.WALK, 1, "first")
    (first / "noop" / "r1").mkdir(parents=True)
    for name in (session.PAGE, session.RESULT):
        (first / name).write_text("{}")
    session.pack(first, packed)
    assert len(list(packed.iterdir())) == 3
    kept = finished(second, "plain", 1, "second") / "records" / "steps.jsonl"
    session.restore(packed / "records.tar.xz", second)
    assert kept.read_text() == "second"
    brought = second / session.WALK / "r1" / "records" / "steps.jsonl"
    assert brought.read_text() == "first"
    assert not (second / "noop").exists()


def test_of_a_transfer_engine_only_what_its_modules_load_is_packed():
    files = {
        "engine/core.so": b"\0libone-1.so.2\0libc.so.6\0",
        "engine.libs/libone-1.so.2": b"\0libtwo.so\0",
        "engine.libs/libtwo.so": b"\0",
        "engine.libs/libthree.so": b"\0libone-1.so.2\0",
        "engine/core.py": b"libthree.so\0",
    }
    assert pack.needed(files, ["engine/*.so"]) == {*files} - {
        "engine.libs/libthree.so",
        "engine/core.py",
    }


def test_a_wheel_is_fetched_in_the_locked_version_with_its_hashes():
    lock = "a==1 ; python_version < '3.14' \\\n    --hash=sha256:1\n"
    lock += "b==2 \\\n    --hash=sha256:2\n"
    assert pack.requirements(["a"], lock) == "a==1 \\\n    --hash=sha256:1"
    with pytest.raises(pack.PackError, match="has no c"):
        pack.requirements(["a", "c"], lock)
    carried = pack.read_carried()
    names = [*carried.carry, *carried.transfer_engines]
    assert pack.requirements(names, pack.LOCK.read_text()).count("--hash") >= len(names)
    assert not set(carried.present) & set(carried.carry)


def test_operators_that_may_be_missing_stay_missing(tmp_path):
    text = 'torch.ops._C.a(x)\nif hasattr(torch.ops._C, "b"): torch.ops._C.b\n'
    (tmp_path / "ops.py").write_text(text + "torch.ops._moe_C.c.default\n")
    assert pack.operators(tmp_path) == {"_C": ["a"], "_moe_C": ["c"]}


def test_a_stand_in_is_imported_and_says_so_where_its_value_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    stand_ins.install(["kvtax_absent"])
    from kvtax_absent.inner import Base, column

    class Own(Base):
        pass

    column("a") + column("b")
    assert not isinstance(1, Base)
    assert Own()
    with pytest.raises(RuntimeError, match=r"kvtax_absent\.inner\.column was called"):
        int(column("a"))
    for name in [name for name in sys.modules if name.startswith("kvtax_absent")]:
        del sys.modules[name]


def bare_machine(folder: Path) -> Path:
    """Make a Python that has PyTorch and nothing that must be carried."""
    venv.create(folder, symlinks=True)
    of_torch = importlib.metadata.requires("torch") or []
    libraries = [re.split(r"[^\w-]", line)[0] for line in of_torch]
    cuda = [name for name in libraries if name.startswith("nvidia")]
    for name in [*pack.read_carried().present, *cuda]:
        _link(importlib.metadata.distribution(name), folder / SITE)
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    (folder / "lib" / "libiomp5.so").symlink_to(openmp)
    return folder / "bin" / "python"


def _link(own: importlib.metadata.Distribution, site: Path) -> None:
    for top in {Path(str(file)).parts[0] for file in own.files or []}:
        place = site / top
        if top not in ("..", "__pycache__") and not place.exists():
            place.symlink_to(own.locate_file(top))


def tree(folder: Path) -> Path:
    """Copy what travels: the files of the checkout, without its history."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.check_output(listed, cwd=REPOSITORY).decode().split("\0")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


@pytest.mark.long
def test_the_session_runs_on_a_bare_machine_twice_and_goes_on(tmp_path):
    """It has PyTorch, no vLLM, no network, no history, and what was packed."""
    packed, checkout = tmp_path / "pack.tar.xz", tree(tmp_path / "tree")
    assert pack.build(packed, SITE.split("/")[1].removeprefix("python")) < pack.MOST_MIB
    python = bare_machine(tmp_path / "bare")
    own, out, results = (tmp_path / name for name in ("own", "out", "results"))
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def apart(*command: object) -> subprocess.CompletedProcess:
        whole = [*APART, sys.executable, "-c", LOOPBACK_UP, *map(str, command)]
        return subprocess.run(
            whole, cwd=checkout, env=env, capture_output=True, text=True
        )

    made = apart(python, "studies/gpu/bare.py", packed, own, "--cpu")
    assert made.returncode == 0, made.stderr
    command = [own / "bin" / "python", "-m", "studies.gpu.session", "--dry-run"]
    command += ["--out", out, "--pack", results]
    stopped = apart(*command, "--minutes", "0.1")
    assert stopped.returncode == 3, stopped.stderr
    assert "No time was left for `nixl_both`" in stopped.stdout
    before = {file: file.stat().st_mtime_ns for file in out.rglob("trial.json")}
    assert before
    done = apart(*command)
    assert done.returncode == 0, done.stderr + done.stdout
    assert {file: file.stat().st_mtime_ns for file in before} == before
    text = (results / session.PAGE).read_text()
    for name in (session.PLAIN, session.WALK, "nixl_both"):
        assert f"| `{name}` |" in text
    assert len(list(results.iterdir())) == 3
    facts = json.loads((results / session.RESULT).read_text())["provenance"]
    assert facts["git_commit"]
    with tarfile.open(results / "records.tar.xz") as records:
        assert f"{session.WALK}/r2/trial.json" in records.getnames()
    assert not os.listdir(tmp_path / "bare" / SITE).count("vllm")
