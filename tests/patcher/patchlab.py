# SPDX-License-Identifier: Apache-2.0
"""Helpers of these tests: synthetic packages and patches, snapshots, killed calls."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvtax.patcher import Patch, Tree, load_patch

SCHEDULER = """\
# A comment first.
import os


class Scheduler:
    '''Docstring.'''

    def __init__(self):
        self.waiting = []
        self.running = []

    @property
    def load(self):
        return len(self.running)

    @load.setter
    def load(self, value):
        self.running = [0] * value

    def schedule(self, budget):
        tokens = 0
        for request in self.waiting:
            # a comment of the body
            if request > budget:
                break
            tokens += request
        return tokens  # trailing comment


def limit():
    return 100
"""
# CRLF, tabs, form feed, trailing blanks, and no newline at the end.
CORE = (
    b"import os\r\n\x0c\r\ndef step():\r\n\tcount = 1   \r\n"
    b"\tif count:\r\n\t\tcount = 2"
)
BOM = b"\xef\xbb\xbfname = 'bom'\nother = 1\n"
LATIN = "# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n".encode("latin-1")

FILES = {
    "__init__.py": b"",
    "_version.py": b"__version__ = version = '0.18.1'\n",
    "scheduler.py": SCHEDULER.encode(),
    "v1/__init__.py": b"",
    "v1/core.py": CORE,
    "v1/bom.py": BOM,
    "v1/latin.py": LATIN,
}

NEXT_RELEASE = {
    path: content.replace(b"0.18.1", b"2.0") + b"\n# release 2.0\n"
    for path, content in FILES.items()
}

# Sentinels of somebody else: how a block of theirs begins and ends.
FOREIGN = (
    ("# BLOCK_BEGIN", "# BLOCK_END"),
    ("# BLOCK_BEGIN step_timing_v1", "# BLOCK_END step_timing_v1"),
    ("# BLOCK_BEGIN v1:x", "# BLOCK_END v1:x"),
    ("# BLOCK_BEGIN v1:x sha256:0123456789abcdef", "# BLOCK_END v1:x"),
    ("# BLOCK_BEGIN v1:x 0123456789abcdef", "# BLOCK_END v1:x 0123456789abcdef"),
    ("# BLOCK_BEGIN v1:x 0123ABCD", "# BLOCK_END v1:x 0123ABCD"),
    ("# BLOCK_BEGIN v1:x 0123abcd", "# BLOCK_END v1:x 0123abcd"),
    ("# BLOCK_BEGIN v1:x 0123abcd was=9", "# BLOCK_END v1:x 0123abcd"),
    ("# BLOCK_BEGIN v1:x 0123abcd", "# BLOCK_END v1:x"),
    ("# BLOCK_BEGIN v1:x", "# BLOCK_END v1:x 0123abcd"),
    ("# BLOCK_BEGIN v1+v0:x.py 0123abcd", "# BLOCK_END v1+v0:x.py 0123abcd"),
    ("# BLOCK_BEGIN step timing v1: 1", "# BLOCK_END step timing v1: 1"),
    ("# BLOCK_BEGIN (v1)", "# BLOCK_END (v1)"),
    ("#BLOCK_BEGIN v1", "#BLOCK_END v1"),
    ("# BLOCK_END v1:x", "# BLOCK_BEGIN v1:x"),
    ("# === BLOCK_BEGIN v1 ===", "# === BLOCK_END v1 ==="),
    ("# STEP_TIMING_V1 BLOCK_BEGIN", "# STEP_TIMING_V1 BLOCK_END"),
)

RECORDS = b"# records\nVALUES = []\n"


def make_tree(parent: Path, files: dict[str, bytes] = FILES, name="demo") -> Tree:
    for path, content in files.items():
        place = parent / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    if "v1/core.py" in files:
        (parent / name / "v1/core.py").chmod(0o754)
    return Tree(parent / name)


def make_patch(folder: Path, name: str, blocks=(), files=None, /, **fields) -> Patch:
    """Write patch ``name`` below ``folder`` and load it; a block or table is a dict."""
    fields = {"name": name, "package": "demo", "summary": "a test patch"} | fields
    tables = {key: value for key, value in fields.items() if isinstance(value, dict)}
    lines = [
        f"{key} = {json.dumps(value)}"
        for key, value in fields.items()
        if key not in tables
    ]
    for name_of_table, table in tables.items():
        lines += [f"[{name_of_table}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    for number, (path, content) in enumerate((files or {}).items()):
        (place / f"source{number}.py").write_bytes(content)
        lines += ["[[file]]", f'path = "{path}"', f'source = "source{number}.py"']
    for number, block in enumerate(blocks):
        block = {"id": f"b{number}", "file": "scheduler.py", "scope": ""} | block
        lines += ["[[block]]"]
        given = block.pop("given", None)
        lines += [f"{key} = {json.dumps(value)}" for key, value in block.items()]
        lines += ["[block.given]"] if given else []
        lines += [f"{k} = {json.dumps(v)}" for k, v in (given or {}).items()]
    (place / "patch.toml").write_text("\n".join(lines) + "\n")
    return load_patch(place)


def block(where: str, scope: str, anchor: str, code: str, **fields) -> dict:
    return {"where": where, "scope": scope, "anchor": anchor, "code": code} | fields


SCHEDULE = "Scheduler.schedule"
_IF_COUNT = {"scope": "step", "anchor": "if count:", "file": "v1/core.py"}


def make_patches(folder: Path) -> dict[str, Patch]:
    """Five patches that meet at the same anchors and add the same files."""
    alpha = make_patch(
        folder,
        "alpha",
        [
            block("before", SCHEDULE, "tokens = 0", "alpha_first = 1\nalpha_next = 2"),
            block("before", SCHEDULE, "tokens = 0", "alpha_third = 3"),
            block("after", SCHEDULE, "for request in self.waiting:", "alpha_out = 4"),
            block("after", "", "import os", "import sys", file="v1/core.py"),
        ],
        {"v1/new/records.py": RECORDS, "v1/new/__init__.py": b""},
    )
    beta = make_patch(
        folder,
        "beta",
        [
            block("before", SCHEDULE, "tokens = 0", "beta_first = 1"),
            block("after", SCHEDULE, "tokens += request", "beta_in = @LIMIT@"),
            block("after", "step", "count = 2", "count = 3", file="v1/core.py"),
        ],
        {"v1/new/records.py": RECORDS, "v1/new/deep/more.py": b"x = 1\n"},
        parameters={"LIMIT": 7},
    )
    gamma = make_patch(
        folder,
        "gamma",
        [
            block("replace", "", "def limit():", "def limit():\n    return 200"),
            block("replace", SCHEDULE, "return tokens", "return tokens + 1"),
            block("after", "", "name = 'bom'", "gamma = 1", file="v1/bom.py"),
        ],
    )
    delta = make_patch(
        folder,
        "delta",
        [
            _IF_COUNT | {"where": "after", "code": "delta = 1"},
            _IF_COUNT | {"where": "before", "code": "delta = 0"},
            block("before", "", "name = 'caf\xe9'", "delta = 1", file="v1/latin.py"),
            block("after", SCHEDULE, "return tokens", "delta = 'never reached'"),
        ],
        {"v1/new/records.py": RECORDS},
    )
    epsilon = make_patch(
        folder,
        "epsilon",
        [
            block("replace", SCHEDULE, "tokens = 0", "tokens = 10\n\n# done"),
            block(
                "before",
                "",
                "def step():",
                '@print\ndef other():\n    """A docstring\n    of two lines."""',
                file="v1/core.py",
            ),
        ],
    )
    return {p.name: p for p in (alpha, beta, gamma, delta, epsilon)}


def run_python(tree: Tree, code: str) -> str:
    """Output of ``code`` in a fresh Python that finds the tree and keeps bytecode."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree.root.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    assert list(tree.root.glob("__pycache__/scheduler.*.pyc"))
    return out.stdout


def snapshot(root: Path) -> dict[str, object]:
    """Bytes and mode of every file and mode of every directory, bytecode apart."""
    caught: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        mode = path.lstat().st_mode
        caught[name] = (mode, None if path.is_dir() else path.read_bytes())
    return caught


def without_ours(shot: dict[str, object]) -> dict[str, object]:
    """The snapshot without journal and lock."""
    return {path: it for path, it in shot.items() if not path.startswith(".blockpatch")}


def upgrade(root: Path) -> None:
    """Write the next release over the tree, as pip does: other files stay."""
    for path, content in NEXT_RELEASE.items():
        (root / path).write_bytes(content)


def restore(root: Path, shot: dict[str, object]) -> None:
    """Make the tree again what it was when ``snapshot`` gave ``shot``."""
    shutil.rmtree(root)
    root.mkdir()
    for name, (mode, content) in shot.items():
        path = root / name
        path.mkdir() if content is None else path.write_bytes(content)
        path.chmod(mode & 0o7777)


_STEPS = {
    "open": builtins,
    **dict.fromkeys(
        ["mkdir", "replace", "unlink", "rmdir", "fsync", "fchmod", "utime", "write"], os
    ),
}
NEED_SPACE = ("open", "mkdir", "replace", "fsync", "write")


def at_step(number: int, action: Callable[[], None], names=tuple(_STEPS)) -> list[int]:
    """From now on in this process, run ``action`` before the number-th file operation.

    Returns a one-element list that counts the operations.
    """
    count = [0]

    def wrap(name, function):
        def stepped(*args, **kwargs):
            mode = kwargs.get("mode", args[1] if len(args) > 1 else "r")
            if name == "open" and "r" in str(mode):
                return function(*args, **kwargs)
            count[0] += 1
            if count[0] == number:
                action()
            return function(*args, **kwargs)

        return stepped

    for name in names:
        setattr(_STEPS[name], name, wrap(name, getattr(_STEPS[name], name)))
    return count


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # Tests that ran before in this process may have set a handler.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work()
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a process killed before its number-th step; was it killed?"""

    def killed() -> None:
        at_step(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        work()

    status = in_child(killed)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0
    return False
