# SPDX-License-Identifier: Apache-2.0
"""Make an environment with vLLM on a machine that has PyTorch alone, and no network.

    python3 studies/gpu/bare.py PACK VENV [--cpu]

PACK is the file that `python -m studies.gpu.pack` wrote elsewhere. VENV is a folder
that does not exist yet; its Python also sees the packages of the one that runs this,
which stay as they are. With --cpu vLLM takes itself for a build for CPUs. Needs
Python's own library only, and 10 seconds.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
OPENMP = "lib/libiomp5.so"


def make(pack: Path, folder: Path, cpu: bool) -> Path:
    """Make the environment; return its Python."""
    venv.create(folder, symlinks=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = folder / "lib" / version / "site-packages"
    with tarfile.open(pack) as packed:
        # Python 3.11.2, that of Debian 12, has no filters: our own pack needs none.
        if hasattr(tarfile, "data_filter"):
            packed.extraction_filter = tarfile.data_filter
        packed.extractall(site)
    outer = dict.fromkeys(
        (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    )
    (site / "kvtax_machine.pth").write_text("\n".join([str(CHECKOUT), *outer]) + "\n")
    names = (site / "stand_ins.txt").read_text().split()
    line = f"import studies.gpu.stand_ins as s; s.install({names!r})\n"
    # After the file above, which has the path: these are read in order.
    (site / "kvtax_stand_ins.pth").write_text(line)
    if cpu:
        (metadata,) = site.glob("vllm-*.dist-info/METADATA")
        lines = metadata.read_text().splitlines()
        named = [f"{x}+cpu" if x.startswith("Version: ") else x for x in lines]
        metadata.write_text("\n".join(named) + "\n")
        openmp = Path(sys.prefix, OPENMP)
        if openmp.exists():
            (folder / OPENMP).symlink_to(openmp)
    return folder / "bin" / "python"


def main() -> None:
    """Make the environment and print its Python."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pack", type=Path, metavar="PACK")
    parser.add_argument("venv", type=Path, metavar="VENV")
    parser.add_argument("--cpu", action="store_true", help="see above")
    given = parser.parse_args()
    print(make(given.pack, given.venv.absolute(), given.cpu))


if __name__ == "__main__":
    main()
