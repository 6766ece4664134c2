# SPDX-License-Identifier: Apache-2.0
"""Pack what a machine with PyTorch alone lacks to run studies.gpu.session.

    python -m studies.gpu.pack --out .gpu/pack.tar.xz [--python 3.12]

In the pack are the wheels of carried.toml in the locked versions, of transfer engines
only the libraries that are loaded, and the Python files of vLLM 0.18.1 (fetch_vllm.sh),
with stand-ins for what is compiled. `studies/gpu/bare.py` unpacks it there. Needs pip's
index, and four minutes of CPU time: most of it compresses.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import msgspec

from kvtax.engine.provenance import checkout
from kvtax.paths import REPOSITORY

HERE = Path(__file__).parent
LOCK = REPOSITORY / "locks" / "cpu.txt"
VLLM = REPOSITORY / "third_party" / "vllm-0.18.1" / "vllm"
VERSION = "0.18.1"
# The repository travels beside the pack, and both may have 64 MiB.
MOST_MIB = 48.0
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 28, 27, 17, 12, 5)]
OPERATOR = re.compile(r"torch\.ops\.(_C\w*|_moe_C)\.(\w+)")
# What is asked for so may be missing.
ASKED_FOR = re.compile(r'hasattr\(torch\.ops\.(_C\w*|_moe_C), "(\w+)"\)')
# (file of vLLM, text, its replacement): what cannot be without compiled parts.
EDITS = (
    (
        "vllm_flash_attn/__init__.py",
        "if not (FA2_AVAILABLE or FA3_AVAILABLE):",
        "if False:",
    ),
    (
        "utils/torch_utils.py",
        "return torch.ops._C.weak_ref_tensor(tensor)",
        "return tensor",
    ),
)
UNUSED = shutil.ignore_patterns("__pycache__", "*.so", "*.cu", "*.cuh", "benchmarks")


class Carried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """List of what travels, from carried.toml."""

    carry: list[str]
    transfer_engines: dict[str, list[str]]
    stand_ins: list[str]
    present: list[str]


class PackError(Exception):
    """The pack cannot be made; the message says why."""


def read_carried() -> Carried:
    """Read carried.toml."""
    return msgspec.convert(
        tomllib.loads((HERE / "carried.toml").read_text()), type=Carried
    )


def requirements(names: Iterable[str], lock: str) -> str:
    """Cut the entries of `names` with hashes out of a lock. Raises PackError."""
    entries = re.split(r"^(?=[\w.-]+==)", lock, flags=re.MULTILINE)
    of_name = {entry.partition("==")[0]: entry for entry in entries if "==" in entry}
    if missing := [name for name in names if name not in of_name]:
        raise PackError(f"{LOCK.name} has no {', '.join(missing)}")
    kept = (of_name[name].splitlines() for name in names)
    return "\n".join(
        re.sub(r" ; .*?(?= \\$)", "", line)
        for lines in kept
        for line in lines
        if line.strip() and not line.lstrip().startswith("#")
    )


def download(names: list[str], python: str, folder: Path) -> None:
    """Fetch the locked wheels of `names` for a Python. Raises PackError."""
    wanted = folder / "requirements.txt"
    wanted.write_text(requirements(names, LOCK.read_text()))
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "-r", str(wanted)]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [part for name in PLATFORMS for part in ("--platform", name)]
    if subprocess.run([*command, "-d", str(folder)]).returncode:
        raise PackError("pip could not fetch the wheels above")


def needed(files: dict[str, bytes], roots: list[str]) -> set[str]:
    """Return the libraries among `files` that those named by `roots` load.

    A library names what it loads, in full.
    """
    libraries = [name for name in files if ".so" in Path(name).name]
    todo = [name for name in libraries if any(fnmatch(name, root) for root in roots)]
    loaded: set[str] = set()
    while todo:
        name = todo.pop()
        loaded.add(name)
        content = files[name]
        for other in libraries:
            if other not in loaded and f"{Path(other).name}\0".encode() in content:
                todo.append(other)
    return loaded


def unpack(wheel: Path, site: Path, roots: list[str] | None) -> None:
    """Unpack a wheel; of a transfer engine, Python files and libraries of `roots`."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if not name.endswith("/")]
        if roots is not None:
            libraries = needed({name: packed.read(name) for name in names}, roots)
            kept = (".py", "METADATA", "RECORD")
            names = [n for n in names if n in libraries or n.endswith(kept)]
        packed.extractall(site, names)


def operators(package: Path) -> dict[str, list[str]]:
    """List the operators that vLLM's sources name, by namespace."""
    names: dict[str, set[str]] = defaultdict(set)
    for file in package.rglob("*.py"):
        text = file.read_text()
        for namespace, name in OPERATOR.findall(text):
            names[namespace].add(name)
    for file in package.rglob("*.py"):
        for namespace, name in ASKED_FOR.findall(file.read_text()):
            names[namespace].discard(name)
    return {namespace: sorted(of) for namespace, of in sorted(names.items())}


def place_vllm(site: Path) -> None:
    """Copy vLLM's Python files; stand in for what is compiled. Raises PackError."""
    if not VLLM.is_dir():
        raise PackError(f"{VLLM} is missing: bash fetch_vllm.sh {VERSION}")
    package = site / "vllm"
    shutil.copytree(VLLM, package, ignore=UNUSED)
    for name, text, replacement in EDITS:
        file = package / name
        content = file.read_text()
        if content.count(text) != 1:
            raise PackError(f"vllm/{name} has not once: {text}")
        file.write_text(content.replace(text, replacement))
    marked = "NAMES: dict[str, list[str]] = {}"
    compiled = (HERE / "compiled.py").read_text()
    named = f"{marked.removesuffix('{}')}{operators(package)!r}"
    (package / "_C.py").write_text(compiled.replace(marked, named))
    # What vLLM's CPU platform imports, by the processor.
    for name in ("_C_AVX2", "_C_AVX512"):
        (package / f"{name}.py").write_text("from vllm import _C  # noqa: F401\n")
    (package / "_moe_C.py").write_text("")
    metadata = site / f"vllm-{VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n"
    )


def build(out: Path, python: str) -> float:
    """Write the pack; return its MiB. Raises PackError."""
    carried = read_carried()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch, "wheels"), Path(scratch, "site")
        wheels.mkdir()
        site.mkdir()
        download([*carried.carry, *carried.transfer_engines], python, wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            name = wheel.name.partition("-")[0].replace("_", "-")
            unpack(wheel, site, carried.transfer_engines.get(name))
        place_vllm(site)
        (site / "stand_ins.txt").write_text("\n".join(carried.stand_ins))
        (site / "packed.json").write_text(json.dumps(checkout()))
        with tarfile.open(out, "w:xz") as packed:
            for entry in sorted(site.iterdir()):
                packed.add(entry, entry.name)
    return out.stat().st_size / 2**20


def _largest(pack: Path) -> Iterator[str]:
    sizes: dict[str, int] = defaultdict(int)
    with tarfile.open(pack) as packed:
        for member in packed:
            sizes[member.name.partition("/")[0]] += member.size
    for name in sorted(sizes, key=lambda name: -sizes[name])[:12]:
        yield f"{sizes[name] / 2**20:7.1f} MiB {name}"


def main() -> int:
    """Make the pack; return 0 if it may be carried."""
    parser = argparse.ArgumentParser(
        "python -m studies.gpu.pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path(".gpu/pack.tar.xz"))
    parser.add_argument("--python", default="3.12", help="of that machine; 3.12")
    given = parser.parse_args()
    try:
        mib = build(given.out, given.python)
    except PackError as error:
        print(f"gpu pack: {error}", file=sys.stderr)
        return 3
    print("unpacked:", *_largest(given.out), f"{given.out}: {mib:.1f} MiB", sep="\n")
    if mib > MOST_MIB:
        print(f"gpu pack: more than {MOST_MIB:g} MiB", file=sys.stderr)
    return 3 if mib > MOST_MIB else 0


if __name__ == "__main__":
    sys.exit(main())
