# SPDX-License-Identifier: Apache-2.0
"""The arrows between rooms, as CONTRIBUTING.md draws them, hold in the code."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from conftest import marks
from kvtax.engine.connector import connector_names
from kvtax.paths import REPOSITORY

# What a room may import besides itself. The rule of the innermost room counts.
EVERYWHERE = {"kvtax.signals"}
ANALYSIS = {
    "kvtax.config",
    "kvtax.paths",
    "kvtax.records",
    "kvtax.report",
    "kvtax.stats",
    "kvtax.steps",
}
# The rooms that other projects build on.
PUBLIC = ANALYSIS | {
    "kvtax.cli",
    "kvtax.engine",
    "kvtax.hosts",
    "kvtax.load",
    "kvtax.proc",
    "kvtax.run_folder",
}
ROOMS: dict[str, set[str]] = {
    "kvtax": set(),
    "kvtax.patcher": set(),
    "kvtax.records": set(),
    "kvtax.stats": {"kvtax.records"},
    "kvtax.report": {"kvtax.records"},
    "kvtax.steps": {"kvtax.records"},
    "kvtax.verdict": ANALYSIS,
    "kvtax.look": ANALYSIS,
    "kvtax.load": {"kvtax.records"},
    "kvtax.proc": {"kvtax.paths"},
    "kvtax.engine": {
        "kvtax.config",
        "kvtax.paths",
        "kvtax.patcher",
        "kvtax.proc",
        "kvtax.records",
    },
    "kvtax.hosts": {"kvtax.paths", "kvtax.engine", "kvtax.config", "kvtax.proc"},
    "kvtax.axes": ANALYSIS
    | {"kvtax.verdict", "kvtax.engine", "kvtax.hosts", "kvtax.patcher", "kvtax.proc"},
    "kvtax.cli": {"kvtax"},
    "kvtax_fleet": PUBLIC,
    "kvtax_fleet.policies": {"kvtax.records", "kvtax_fleet.records"},
    "kvtax_fleet.records": {"kvtax.records"},
    "kvtax_fleet.analyze": ANALYSIS
    | {"kvtax_fleet.paths", "kvtax_fleet.policies", "kvtax_fleet.records"},
    "connectors": set(),
    "connectors.direct_read.peer": {"kvtax", "connectors"},
    "connectors.direct_read.tests": {"kvtax", "connectors", "tests"},
    "patches": set(),
    "probe": set(),
    "microbench": {"kvtax", "connectors"},
    "microbench.summary": ANALYSIS | {"kvtax.verdict", "kvtax.look"},
    "benchmarks": {"kvtax", "connectors", "studies.results"},
    "studies": {
        "kvtax",
        "kvtax_fleet",
        "connectors",
        "microbench",
        "tools",
        "tests.harness",
    },
    "tools": {"kvtax", "kvtax_fleet"},
    "tools.upstream": {"kvtax", "tools", "tests.harness"},
    "kvindex": {"kvtax"},
}
# What each process that imports it pays for.
HEAVY = {"torch", "transformers", "vllm"}
# What is launched where nobody names a config, and words of a variable and of a format.
NAMED_FOR_A_REASON = (
    "kvtax/engine/connector.py",
    "kvtax/engine/environment.py",
    "fleet/src/kvtax_fleet/records/instances.py",
)


def sources(root: Path) -> list[Path]:
    """Every Python file of the rooms below `root`, ignored ones left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return sorted(path for name in listed if (path := root / name).is_file())


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(base_of(path, root)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def base_of(path: Path, root: Path) -> Path:
    """The folder of `sys.path` from which `path` is imported."""
    fleet = root / "fleet" / "src"
    return fleet if path.is_relative_to(fleet) else root


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements, of functions and branches too."""
    parents = ast.stmt | ast.excepthandler | ast.match_case
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, parents):
            yield from statements(child)


@functools.cache
def imports(path: Path, root: Path) -> list[tuple[int, str]]:
    """(line, module) of each import of ours, in functions too."""
    base_folder = base_of(path, root)
    package = path.relative_to(base_folder).parent.parts
    wrong = []
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                wrong.append((node.lineno, alias.name))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                files = [
                    folder.joinpath(*base.split("."), alias.name)
                    for folder in (root, root / "fleet" / "src")
                ]
                is_module = any(
                    file.with_suffix(".py").exists() or file.is_dir() for file in files
                )
                name = f"{base}.{alias.name}" if is_module else base
                wrong.append((node.lineno, name))
    return wrong


def wrong_arrows(root: Path) -> list[str]:
    """`file:line: room imports module` for each import that no rule allows."""
    top_rooms = {room.partition(".")[0] for room in ROOMS} | {"tests"}
    wrong = []
    for path in sources(root):
        module = module_of(path, root)
        rooms = [room for room in ROOMS if within(module, room)]
        if not rooms:
            continue
        room = max(rooms, key=len)
        for line, imported in imports(path, root):
            ours = imported.partition(".")[0] in top_rooms
            allowed = {room} | ROOMS[room] | (EVERYWHERE if ROOMS[room] else set())
            if ours and not any(within(imported, module) for module in allowed):
                where = path.relative_to(root)
                wrong.append(f"{where}:{line}: {room} imports {imported}")
    return wrong


@pytest.mark.slow
def test_every_import_follows_an_arrow():
    assert wrong_arrows(REPOSITORY) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kvtax/engine/x.py", "from microbench.profile import Profile"),
        ("kvtax/stats/x.py", "import kvtax.engine.server"),
        (
            "fleet/src/kvtax_fleet/proxy/x.py",
            "def f():\n    from microbench import sweep",
        ),
        ("kvtax/verdict/x.py", "from ..trial import run_trial"),
        ("kvtax/verdict/x.py", "from kvtax.engine import provenance"),
        (
            "fleet/src/kvtax_fleet/analyze/x.py",
            "from kvtax_fleet.experiment import experiment_plan",
        ),
        ("fleet/src/kvtax_fleet/x.py", "import benchmarks.hooks"),
        ("tools/x.py", "from studies.harness import publish"),
        ("benchmarks/x.py", "import studies.observatory"),
        ("kvtax/look/x.py", "from studies import harness"),
        ("benchmarks/x.py", "from tests.releases import INSTALLED"),
        ("kvtax/patcher/x.py", "from kvtax import paths"),
        ("kvtax/records/x.py", "from kvtax.engine import server"),
        ("connectors/x.py", "from kvtax.paths import REPOSITORY"),
    ],
)
def test_a_wrong_arrow_is_named_with_its_line(file, line, tmp_path):
    rooms = ("kvtax", "microbench", "benchmarks", "studies", "tests", "connectors")
    for name in rooms:
        (tmp_path / name).mkdir()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(f"import os\n{line}\n")
    number = 1 + line.count("\n") + 1
    (wrong,) = wrong_arrows(tmp_path)
    assert wrong.startswith(f"{file}:{number}: ")


@pytest.mark.slow
def test_no_two_files_need_each_other():
    modules = {module_of(path, REPOSITORY): path for path in sources(REPOSITORY)}
    needs = {
        module: {name for _, name in imports(path, REPOSITORY) if name in modules}
        for module, path in modules.items()
    }
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


@pytest.mark.slow
def test_no_code_knows_a_config_by_name():
    """What a config is to a report or to a router stands in its TOML."""
    names = set(connector_names())
    known = []
    for path in sources(REPOSITORY):
        where = path.relative_to(REPOSITORY)
        if where.parts[0] not in ("kvtax", "microbench"):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and node.value in names:
                known.append(f"{where}:{node.lineno}: {node.value!r}")
    assert [name for name in known if not name.startswith(NAMED_FOR_A_REASON)] == []


def imported_at_once(path: Path) -> Iterator[str]:
    """Yield what a file imports when it is imported itself."""
    lines = {
        node.lineno
        for node in parsed(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    yield from (name for line, name in imports(path, REPOSITORY) if line in lines)


@pytest.mark.slow
def test_to_collect_tests_imports_neither_torch_nor_vllm():
    """Or each worker of pytest takes 7 s of CPU time, and 1 GB that its forks copy."""
    files = {module_of(path, REPOSITORY): path for path in sources(REPOSITORY)}
    waiting = [
        name
        for name, path in files.items()
        if path.name.startswith(("test_", "conftest"))
        # Imported to show their results.
        or (name.startswith("studies.") and name.endswith(".__main__"))
        # Those inside a patched vLLM are read, and not imported.
        if not name.startswith("tests.patched.test_")
        if "long" not in marks(path)
    ]
    reached: set[str] = set()
    while waiting:
        if (name := waiting.pop()) in reached:
            continue
        reached.add(name)
        waiting += imported_at_once(files[name]) if name in files else []
    assert {name for name in reached if name.partition(".")[0] in HEAVY} == set()
