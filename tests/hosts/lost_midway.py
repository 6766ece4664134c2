# SPDX-License-Identifier: Apache-2.0
"""An experiment in virtual time on three hosts, one of which is lost midway, and here.

    python -m tests.hosts.lost_midway CONFIG --out FOLDER

A host is killed when a third of the runs are done, and another one joins. Then the
experiment is made without Ray, and all bytes are compared. FOLDER gets `hosts` and
`here`, the two runs. Prints Markdown; ends with 1 if a byte differs. Needs root.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from kvtax_fleet.experiment.config import read_experiment
from kvtax_fleet.experiment.experiment_plan import plan

from kvtax.paths import REPOSITORY
from kvtax.signals import exit_on_signals
from tests.hosts.ray_cluster import HeadCommand, RayCluster

HOSTS, LOST = 3, 1
# With 1 a comparison is refused, or a run failed: that, too, must be so in both.
ENDED = (0, 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.hosts.lost_midway", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    exit_on_signals()
    runs = len(plan(read_experiment(chosen.config)))
    out = chosen.out.resolve()
    out.mkdir(parents=True)
    hosts, here = out / "hosts", out / "here"
    began_s = time.monotonic()
    with RayCluster(HOSTS) as cluster:
        told, lost_at = over_hosts(cluster, chosen.config, hosts, runs // 3)
        lost = cluster.hosts[LOST].address
    over_s = time.monotonic() - began_s
    here_command = [sys.executable, "-m", *command(chosen.config, here)]
    done = subprocess.run(here_command, cwd=REPOSITORY)
    assert done.returncode in ENDED
    here_s = time.monotonic() - began_s - over_s
    different = differences(files(hosts), files(here))
    print(f"- {runs} runs over hosts in {over_s:,.0f} s, here in {here_s:,.0f} s")
    print(f"- {lost} was killed when {lost_at} runs were done; then another one came")
    for line in re.findall(r"^[\d.]+: \d+ done.*$", told, re.MULTILINE):
        print(f"- {line}")
    print(f"- {len(files(here)):,} files; different: {different or 'none'}")
    return int(bool(different))


def command(config: Path, out: Path, *more: str) -> list[str]:
    return ["kvtax", "fleet", str(config), "--virtual", "--out", str(out), *more]


def over_hosts(
    cluster: RayCluster, config: Path, out: Path, after: int, deadline_s: float = 1e9
) -> tuple[str, int]:
    """Make it on `cluster`; a host is killed when `after` runs are done, one comes.

    What the command printed, and how many runs were done then.
    """
    module = command(config, out, "--ray", cluster.address)
    with HeadCommand(
        cluster, out.with_name("hosts.log"), *module, deadline_s=deadline_s
    ) as run:
        run.wait(lambda: made(out) >= after)
        cluster.hosts[LOST].kill()
        lost_at = made(out)
        cluster.add()
        assert run.status() in ENDED, run.printed
    return run.printed, lost_at


def made(out: Path) -> int:
    return len(list(out.glob("*/r*/arm.json")))


def files(folder: Path) -> dict[str, bytes]:
    """All files of a run; its page names the folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes().replace(
            str(folder).encode(), b"RUN"
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return sorted(
        name for name in one.keys() | other.keys() if one.get(name) != other.get(name)
    )


if __name__ == "__main__":
    sys.exit(main())
