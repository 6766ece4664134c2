# SPDX-License-Identifier: Apache-2.0
"""The wheel is small and works alone, in an empty environment outside the checkout."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path

import pytest

from kvtax.paths import REPOSITORY
from tests.look.made_up_server import served
from tests.releases import package_of

pytestmark = pytest.mark.slow

UV = shutil.which("uv") or str(REPOSITORY / ".uv" / "bin" / "uv")
PYTHONS = ("3.11", "3.13")
MOST_WHEEL_BYTES = 2_000_000
MOST_ENVIRONMENT_BYTES = 320_000_000
# From the installation to an answer.
MOST_SECONDS = 60
CAN_PASTE = (
    f"ls {REPOSITORY}/.git {REPOSITORY}/README.md >/dev/null && /usr/bin/python3 -c "
    "'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))'"
)
HEAVY = ("torch", "vllm", "ray", "transformers", "aiohttp", "matplotlib")


@functools.cache
def built(folder: Path, project: Path = REPOSITORY) -> Path:
    command = [UV, "build", "-q", "--wheel", "--out-dir", str(folder), str(project)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module", params=PYTHONS)
def environment(request, wheel, tmp_path_factory) -> Path:
    """An environment with nothing but the wheel and what it depends on."""
    venv = tmp_path_factory.mktemp(f"python{request.param}") / "venv"
    made = subprocess.run(
        [UV, "venv", "-q", "--python", interpreter(request.param), str(venv)],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"no Python {request.param}: {made.stderr.strip()}")
    python = str(venv / "bin" / "python")
    subprocess.run([UV, "pip", "install", "-q", "--python", python, wheel], check=True)
    return venv


def interpreter(version: str) -> str:
    """The system's Python of this version, which is the oldest, or pyenv's.

    Else the version, for uv to find.
    """
    system = Path(f"/usr/bin/python{version}")
    if system.exists():
        return str(system)
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    return next(map(str, versions.glob(f"{version}.*/bin/python{version}")), version)


@pytest.fixture
def kvtax(environment, tmp_path):
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [environment / "bin" / "kvtax", *map(str, arguments)],
            cwd=tmp_path,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "TMPDIR": str(tmp_path),
            },
            capture_output=True,
            text=True,
        )

    return run


def test_the_wheel_is_small_and_holds_no_results(wheel):
    assert wheel.stat().st_size <= MOST_WHEEL_BYTES
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvtax"}


def test_wheel_and_sdist_name_their_commit(tmp_path, wheel):
    """A wheel that is built from the sdist, without git, too."""
    commands = [
        [UV, "build", "-q", "--sdist", "--out-dir", str(tmp_path), str(REPOSITORY)],
        [UV, "build", "-q", "--wheel", "--out-dir", str(tmp_path / "again")],
    ]
    subprocess.run(commands[0], check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    subprocess.run([*commands[1], str(sdist)], check=True)
    (again,) = (tmp_path / "again").glob("*.whl")
    commits = [
        zipfile.ZipFile(file).read("kvtax/data/COMMIT").decode().strip()
        for file in (wheel, again)
    ]
    assert commits[0] == commits[1]
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", commits[0])


def test_the_environment_is_small_and_has_no_heavy_package(environment):
    files = [path for path in environment.rglob("*") if path.is_file()]
    assert sum(path.lstat().st_size for path in files) <= MOST_ENVIRONMENT_BYTES
    (packages,) = environment.glob("lib/python*/site-packages")
    assert [name for name in HEAVY if (packages / name).exists()] == []


def test_look_gives_the_figures_that_the_checkout_gives(kvtax, tmp_path):
    records, page = served(tmp_path / "records").write(), tmp_path / "page.html"
    alone = kvtax("look", records, "--out", page)
    assert (alone.returncode, alone.stderr) == (0, "")
    here = subprocess.run(
        [sys.executable, "-m", "kvtax", "look", records, "--out", page],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"},
    )
    assert alone.stdout == here.stdout


def test_the_demo_answers(kvtax):
    shown = kvtax("demo")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "Remedy" in shown.stdout and "kvtax demo --out" in shown.stdout


def test_the_paste_of_the_readme_answers_within_a_minute_of_the_installation():
    """Line by line as it is printed, in a shell of a user who has nothing.

    Of nobody, if this one may become nobody, and nobody can read the checkout.
    """
    readme = (REPOSITORY / "README.md").read_text()
    paste = re.search(r"(?:^    .+\n)+", readme, re.MULTILINE)[0]
    script = textwrap.dedent(paste).replace("REPOSITORY", str(REPOSITORY))
    script = script.replace("kvtax demo ", "{ TIMEFORMAT='%R s'; time kvtax demo; } ")
    kept = [
        name
        for name in os.environ
        if name.startswith(("PIP_", "SSL_")) or name == "PATH"
    ]
    variables = {name: os.environ[name] for name in kept}
    as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if subprocess.run(
        ["sh", "-c", shlex.join([*as_user, "sh", "-c", CAN_PASTE])]
    ).returncode:
        as_user = []
    else:
        variables["PATH"] = "/usr/bin:/bin"
    # Not below the folder of pytest, which is another user's.
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        # The checkout may be another user's.
        Path(home, ".gitconfig").write_text("[safe]\ndirectory = *\n")
        if as_user:
            os.chown(home, 65534, 65534)
        done = subprocess.run(
            [*as_user, "bash", "-ec", script],
            cwd=home,
            env=variables | {"HOME": home, "TMPDIR": home},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Remedy: kvtax run --fix" in done.stdout
    assert float(done.stderr.split()[-2]) <= MOST_SECONDS


def test_compare_reads_the_committed_sweep(kvtax):
    compared = kvtax("compare", REPOSITORY, REPOSITORY)
    assert (compared.returncode, compared.stderr) == (0, "")


def test_patch_applies_to_a_source_release_and_reverts_to_the_byte(kvtax, tmp_path):
    tree = tmp_path / "vllm"
    shutil.copytree(package_of("0.33.0"), tree)
    before = contents(tree)
    assert kvtax("patch", "--apply", "--target", tree).returncode == 0
    assert contents(tree) != before
    assert kvtax("patch", "--revert", "--target", tree).returncode == 0
    assert contents(tree) == before


def contents(tree: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in tree.rglob("*.py")}


def test_the_fleet_s_wheel_adds_its_commands(environment, tmp_path):
    """Reading a trace takes nothing of what the fleet's wheel depends on."""
    python = str(environment / "bin" / "python")
    wheel = built(tmp_path, REPOSITORY / "fleet")
    subprocess.run([UV, "pip", "install", "-q", "--no-deps", "--python", python, wheel])
    (trace,) = (REPOSITORY / "fleet" / "traces").glob("mooncake_conversation*")
    command = [environment / "bin" / "kvtax", "trace", "stats", trace]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "12,031" in ended.stdout


@pytest.mark.parametrize("command", ["sweep", "axes"])
def test_what_needs_a_checkout_says_so(kvtax, command):
    refused = kvtax(*command.split())
    assert refused.returncode == 2
    assert "checkout" in refused.stderr


def test_a_checkout_can_be_installed_in_place(environment, tmp_path):
    venv = tmp_path / "editable"
    subprocess.run([UV, "venv", "-q", "--python", environment / "bin/python", venv])
    python = str(venv / "bin" / "python")
    install = [UV, "pip", "install", "-q", "--python", python, "-e", str(REPOSITORY)]
    subprocess.run(install, check=True)
    shown = subprocess.run(
        [python, "-c", "import kvtax.paths as p; print(p.REPOSITORY)"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert shown.stdout.strip() == str(REPOSITORY)


def test_the_probe_is_a_small_plugin_without_dependencies(tmp_path):
    command = [UV, "build", "-q", "--wheel", "--out-dir", str(tmp_path)]
    subprocess.run([*command, str(REPOSITORY / "probe")], check=True)
    (wheel,) = tmp_path.glob("kvtax_probe-*.whl")
    assert wheel.stat().st_size < 60_000
    python = interpreter("3.13") if "/" in interpreter("3.13") else sys.executable
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from importlib.metadata import distribution; "
        "probe = distribution('kvtax-probe'); assert not probe.requires; "
        "(plugin,) = probe.entry_points; "
        "assert plugin.group == 'vllm.general_plugins'; "
        "before = set(sys.meta_path); plugin.load()(); "
        "assert set(sys.meta_path) == before; assert 'msgspec' not in sys.modules"
    )
    env = {"PATH": os.environ["PATH"]}
    subprocess.run([python, "-I", "-c", script, wheel], check=True, env=env)
