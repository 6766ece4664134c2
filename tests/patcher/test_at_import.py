# SPDX-License-Identifier: Apache-2.0
"""Modules patched at import are those that `apply` would have left on disk."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvtax.cli import Exit
from kvtax.cli.run import _check_imports
from kvtax.engine.import_watch import ImportWatch
from kvtax.patcher import (
    AnchorError,
    Patch,
    TargetError,
    Tree,
    apply,
    check,
    never_imported,
    plan_imports,
    python_path,
    write_overlay,
)
from tests.patcher.patchlab import RECORDS, block, make_patch, make_tree, snapshot

NOBODY = 65534
# One that nobody may run.
PYTHON_OF_ALL = "/usr/bin/python3"
RAISES = "raise ValueError('from the patch')"


class Site:
    """A folder with the package `demo`, a patch of it and the patch's overlay."""

    hidden: Path | None = None  # what comes before the overlay on PYTHONPATH

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = make_tree(folder / "site")
        (self.tree.root / "v1" / "__init__.py").write_text("one = 1\n")
        (self.tree.root / "v1" / "data.txt").write_text("of the package")
        blocks = [
            block("before", "", "def limit():", "class Added:\n    pass"),
            block("before", "limit", "return 100", f"first = 1\n{RAISES}"),
            block("after", "", "one = 1", "two = 2", file="v1/__init__.py"),
            block("after", "", "name = 'bom'", "patched = True", file="v1/bom.py"),
        ]
        files = {"v1/more/__init__.py": RECORDS, "v1/more/inner.py": b"INNER = 1\n"}
        self.patch = make_patch(folder / "patches", "whole", blocks, files)
        self.overlay = overlay_of(folder / "overlay", self.tree, self.patch)

    def run(
        self,
        script: str,
        *flags: str,
        overlay: Path | None = None,
        python: str = sys.executable,
        **options,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script that finds the overlay and, behind it, the package."""
        path = python_path(overlay or self.overlay, str(self.tree.root.parent))
        path = os.pathsep.join(map(str, filter(None, [self.hidden, path])))
        return subprocess.run(
            [python, *flags, "-c", textwrap.dedent(script)],
            env=os.environ | {"PYTHONPATH": path},
            cwd="/",
            capture_output=True,
            text=True,
            **options,
        )

    def printed(self, script: str, *flags: str, **options) -> list[str]:
        done = self.run(script, *flags, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


def overlay_of(folder: Path, tree: Tree, *patches: Patch) -> Path:
    folder.mkdir()
    write_overlay(folder, plan_imports(patches, {}, lambda _: tree))
    return folder


@pytest.fixture
def site(tmp_path) -> Site:
    return Site(tmp_path)


def test_the_text_of_each_module_is_that_on_disk_and_the_package_is_untouched(site):
    names = ["demo.scheduler", "demo.v1", "demo.v1.bom", "demo.v1.more.inner"]
    script = f"""
    import importlib, inspect
    for name in {names!r}:
        print(repr(inspect.getsource(importlib.import_module(name))))
    """
    before = snapshot(site.tree.root)
    at_import = site.printed(script, "-B")
    assert snapshot(site.tree.root) == before
    apply(site.tree, [site.patch])
    assert site.printed(script, "-B", overlay=Path("/no/overlay")) == at_import


def test_refusals_are_those_on_disk(site):
    blocks = [block("before", "", "no_such_thing()", "pass")]
    misfit = make_patch(site.folder / "patches", "misfit", blocks)
    with pytest.raises(AnchorError) as on_disk:
        apply(site.tree, [misfit])
    with pytest.raises(AnchorError) as at_import:
        plan_imports([misfit], {}, lambda _: Tree(site.tree.root, only_read=True))
    assert str(at_import.value) == str(on_disk.value)


def test_patches_on_disk_and_at_import_add_up(site, patches):
    apply(site.tree, [patches["alpha"]])
    both = [patches["alpha"], patches["beta"]]
    (job,) = plan_imports(both, {"LIMIT": 8}, lambda _: site.tree)
    assert job.plan == check(site.tree, both, {"LIMIT": 8})
    (job,) = plan_imports(both[:1], {}, lambda _: site.tree)
    assert job.plan.changes == ()


def test_tracebacks_and_inspect_show_the_patched_lines(site):
    script = """
    import inspect, traceback
    from demo import scheduler
    assert "raise ValueError" in inspect.getsource(scheduler.limit)
    assert inspect.getsource(scheduler.Added).split() == "class Added: pass".split()
    assert "len(self.running)" in inspect.getsource(scheduler.Scheduler.load.fget)
    print(scheduler.__file__)
    try:
        scheduler.limit()
    except ValueError as error:
        print(traceback.extract_tb(error.__traceback__)[-1].line)
    scheduler.limit()
    """
    done = site.run(script)
    assert done.stdout.splitlines() == [str(site.tree.root / "scheduler.py"), RAISES]
    # The interpreter's own display of what nobody caught reads the file of the code.
    assert f"\n    {RAISES}\n" in done.stderr


def test_data_of_the_package_is_where_it_was(site):
    script = """
    import importlib.resources, pkgutil
    from pathlib import Path
    from demo import v1
    assert v1.two == 2
    for text in (
        (importlib.resources.files(v1) / "data.txt").read_text(),
        pkgutil.get_data("demo.v1", "data.txt").decode(),
        Path(v1.__file__).with_name("data.txt").read_text(),
    ):
        assert text == "of the package"
    assert {one.name for one in pkgutil.iter_modules(v1.__path__)} == {
        "bom", "core", "latin"
    }
    """
    site.printed(script)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_child_processes_are_patched_too(site, method):
    script = site.folder / "parent.py"
    text = f"""
    import multiprocessing, subprocess, sys
    def child(queue):
        from demo.v1 import bom
        queue.put(bom.patched)
    if __name__ == "__main__":
        context = multiprocessing.get_context({method!r})
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(queue.get(timeout=300), flush=True)
        process.join()
        code = "from demo.v1 import bom; print(bom.patched)"
        subprocess.run([sys.executable, "-c", code], check=True)
    """
    script.write_text(textwrap.dedent(text))
    run = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    if method != "fork":  # they need a main module that they can import
        run = (
            f"import subprocess, sys; subprocess.run([sys.executable, {str(script)!r}])"
        )
    assert site.printed(run) == ["True", "True"]


def test_a_module_can_be_run_by_name(site):
    script = "import runpy; print(runpy.run_module('demo.v1.bom')['patched'])"
    assert site.printed(script) == ["True"]


def test_the_sitecustomize_of_the_user_runs_once(site):
    theirs = site.tree.root.parent / "sitecustomize.py"
    theirs.write_text("print('theirs', __name__)\nSEEN = 1\n")
    script = """
    import sitecustomize
    from demo.v1 import bom
    print(sitecustomize.__file__, sitecustomize.SEEN, bom.patched)
    """
    expected = ["theirs sitecustomize", f"{theirs} 1 True"]
    assert site.printed(script) == expected


def test_an_error_in_the_sitecustomize_of_the_user_leaves_the_patches(site):
    (site.tree.root.parent / "sitecustomize.py").write_text("1 / 0\n")
    done = site.run("from demo.v1.bom import patched")
    assert done.returncode == 0
    assert "ZeroDivisionError" in done.stderr


def test_a_file_that_changed_since_is_refused(site):
    place = site.tree.root / "v1" / "bom.py"
    place.write_bytes(place.read_bytes() + b"\n# another release\n")
    # Packages go on without a module that raises ImportError.
    done = site.run("try:\n    import demo.v1.bom\nexcept ImportError:\n    pass")
    assert done.returncode != 0
    assert f"{place} is not the file that the patches were planned for" in done.stderr


def test_a_package_that_has_the_added_module_by_now_is_refused(site):
    (site.tree.root / "v1" / "more.py").write_text("")
    done = site.run("import demo.v1.more")
    assert "the package has one of its own now" in done.stderr


def test_a_module_that_two_overlays_patch_is_refused(site):
    site.hidden = overlay_of(site.folder / "other", site.tree, site.patch)
    done = site.run("import demo.v1.bom")
    assert "name all patches in one of the two" in done.stderr


def test_a_tree_of_links_is_patched_at_import_alone(site):
    linked = site.folder / "linked" / "demo"
    for path in filter(Path.is_file, site.tree.root.rglob("*")):
        place = linked / path.relative_to(site.tree.root)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path)
    with pytest.raises(TargetError, match="symbolic link"):
        apply(Tree(linked), [site.patch])
    tree = site.tree = Tree(linked, only_read=True)
    overlay = overlay_of(site.folder / "other", tree, site.patch)
    script = "from demo.v1 import bom; print(bom.patched, bom.__file__)"
    assert site.printed(script, overlay=overlay) == [f"True {linked}/v1/bom.py"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
@pytest.mark.skipif(not Path(PYTHON_OF_ALL).exists(), reason="no Python of the system")
def test_nobody_imports_the_patched_modules_of_a_read_only_tree(site):
    for folder in (site.overlay, site.tree.root):
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
    for parent in (site.folder, *list(site.folder.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o055)
    with pytest.raises(TargetError, match="read-only"):
        apply(site.tree, [site.patch])
    before = snapshot(site.tree.root)
    plan_imports([site.patch], {}, lambda _: site.tree)
    script = "from demo.v1 import bom, more; print(bom.patched, more.VALUES)"
    assert site.printed(script, python=PYTHON_OF_ALL, user=NOBODY, group=NOBODY) == [
        "True []"
    ]
    assert snapshot(site.tree.root) == before


def test_processes_share_the_bytecode_and_leave_it_in_the_overlay(site):
    for _ in range(2):
        site.printed("import demo.scheduler", "-B")
    (cache,) = site.overlay.rglob("scheduler.py.*.code")
    assert not [*site.overlay.rglob("*.pyc")]
    cache.write_bytes(b"torn")
    site.printed("import demo.scheduler", "-B")
    assert cache.read_bytes() != b"torn"


def test_a_process_without_patched_modules_imports_next_to_nothing(site):
    script = "import sys; print(*sorted(sys.modules))"
    bare = site.printed(script, "-I")[0].split()
    with_overlay = site.printed(script)[0].split()
    more = {*with_overlay} - {*bare}
    assert more <= {
        *("importlib", "importlib._bootstrap", "importlib._bootstrap_external"),
        *("importlib.machinery", "sitecustomize", "warnings", "__future__"),
    }


DELEGATING = """
import importlib.util, sys
class Delegating:
    busy = set()
    def find_spec(self, name, path=None, target=None):
        if name in self.busy:
            return None
        self.busy.add(name)
        try:
            return importlib.util.find_spec(name)
        finally:
            self.busy.discard(name)
sys.meta_path.insert({place}, Delegating())
from demo.v1.bom import patched
from demo.v1.more import inner
print(patched, inner.INNER)
"""


@pytest.mark.parametrize("place", [0, 1, 2, 3, 99])
def test_a_finder_that_asks_all_finders_for_the_spec_does_no_harm(site, place):
    """Import hooks of wrapt, New Relic and Datadog do so."""
    assert site.printed(DELEGATING.format(place=place)) == ["True 1"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_sitecustomize_in_front_that_runs_no_other_does_no_harm(site, method):
    """OpenTelemetry's does so."""
    site.hidden = site.folder / "first"
    site.hidden.mkdir()
    (site.hidden / "sitecustomize.py").write_text("print('theirs')\n")
    script = (
        "from demo.v1 import bom, more; import demo; print(bom.patched, demo.__file__)"
    )
    assert site.printed(script) == ["theirs", f"True {site.tree.root}/__init__.py"]
    by_name = "import runpy; print(runpy.run_module('demo.v1.bom')['patched'])"
    assert site.printed(by_name) == ["theirs", "True"]
    child = site.folder / "child.py"
    child.write_text(
        "def work():\n    from demo.v1 import bom\n    print(bom.patched)\n"
    )
    script = f"""
    import multiprocessing, sys
    import demo.v1.bom
    sys.path.insert(0, {str(site.folder)!r})
    from child import work
    if __name__ == "__main__":
        process = multiprocessing.get_context({method!r}).Process(target=work)
        process.start()
        process.join()
    """
    assert site.printed(script)[-1] == "True"


def test_it_is_known_which_patched_modules_were_imported(site):
    whole = ["demo.scheduler", "demo.v1", "demo.v1.bom"]
    watch = ImportWatch(site.overlay, [], is_strict=True)
    for script, never in {
        "import demo": whole,
        "import demo.v1.more": ["demo.scheduler", "demo.v1.bom"],
        "import demo.scheduler, demo.v1.bom": [],
    }.items():
        site.printed(script)
        assert watch.check([]) is None
        assert never_imported(site.overlay) == (never, never == whole)


@pytest.mark.parametrize("flags", [["-I"], ["-S"], []])
@pytest.mark.parametrize("is_strict", [True, False])
def test_a_process_without_the_patches_is_named(site, capsys, flags, is_strict):
    script = f"""
        import sys; sys.path.insert(0, {str(site.tree.root.parent)!r})
        import demo.scheduler
        print("imported", flush=True)
        sys.stdin.read()
    """
    files = [site.tree.root / "scheduler.py"]
    watch = ImportWatch(site.overlay, files, is_strict)
    command = [sys.executable, *flags, "-c", textwrap.dedent(script)]
    with subprocess.Popen(
        command, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"imported\n"
        assert select.select([watch], [], [], 60)[0]
        assert watch.check([process.pid]) == (3 if is_strict else None)
        process.communicate()
    assert f"process {process.pid} (" in capsys.readouterr().err


def test_patched_processes_and_other_readers_are_not_named(site, capsys):
    watch = ImportWatch(site.overlay, [site.tree.root / "scheduler.py"], True)
    path = python_path(site.overlay, str(site.tree.root.parent))
    script = "import demo.scheduler; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        (site.tree.root / "scheduler.py").read_bytes()
        assert watch.check([process.pid, os.getpid()][:1]) is None
        process.communicate(b"\n")
    assert capsys.readouterr().err == ""


def test_what_anybody_sends_is_no_file_and_a_removed_overlay_ends_no_run(site, capsys):
    watch = ImportWatch(site.overlay, [], is_strict=True)
    place = "\0" + (site.overlay / "reports").read_text()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for name in (b"x" * 4_000, b"a\0b", b"..", b"demo.other", b"\xff"):
            sender.sendto(name, place)
        assert watch.check([]) is None
        assert list((site.overlay / "imported").iterdir()) == []
        sender.sendto(b"demo.v1", place)
    shutil.rmtree(site.overlay)
    assert watch.check([]) is None
    assert _check_imports(site.overlay, 0) == Exit.NOT_MEASURED
    assert f"{site.overlay} was removed while" in capsys.readouterr().err


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_nobody_else_can_write_the_overlay_whatever_the_umask(site, umask):
    before = os.umask(umask)
    try:
        overlay = overlay_of(site.folder / "other", site.tree, site.patch)
        watch = ImportWatch(overlay, [], is_strict=True)
        site.printed("import demo.scheduler, demo.v1.more", overlay=overlay)
        watch.check([])
    finally:
        os.umask(before)
    assert any((overlay / "imported").iterdir())
    modes = {path: path.stat().st_mode for path in [overlay, *overlay.rglob("*")]}
    assert any(path.suffix == ".code" for path in modes)
    assert [path for path, mode in modes.items() if mode & 0o022] == []


def test_an_overlay_that_others_can_write_is_not_used(site):
    site.overlay.chmod(0o777)
    done = site.run("from demo.v1 import bom; print(bom.patched)")
    assert done.returncode != 0
    assert "can be written by others" in done.stderr


def test_the_bytecode_that_a_module_names_is_its_own(site):
    script = "from demo.v1 import bom; print(bom.__cached__, bom.__spec__.cached)"
    (cached,) = {*site.printed(script)[0].split()}
    assert Path(cached).is_relative_to(site.overlay) and Path(cached).exists()
