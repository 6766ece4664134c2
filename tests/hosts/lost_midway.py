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
from collections.abc import Callable
from pathlib import Path

from fleet.experiment.config import read_experiment
from fleet.experiment.plan import plan
from lab.paths import REPOSITORY
from lab.serving.supervise import exit_on_signals
from tests.hosts.ray_cluster import RayCluster

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
    done = subprocess.run(command(chosen.config, here), cwd=REPOSITORY)
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
    module = [sys.executable, "-m", "fleet.experiment", str(config), "--virtual"]
    return [*module, "--out", str(out), *more]


def over_hosts(
    cluster: RayCluster, config: Path, out: Path, after: int, deadline_s: float = 1e9
) -> tuple[str, int]:
    """Make it on `cluster`; a host is killed when `after` runs are done, one comes.

    What the command said, and how many runs were done then.
    """
    log = out.with_name("hosts.log")
    run = cluster.on_head(*command(config, out, "--ray", cluster.address))
    with log.open("wb") as told:
        process = subprocess.Popen(run, cwd=REPOSITORY, stdout=told, stderr=told)
        try:
            wait(process, lambda: made(out) >= after, deadline_s)
            cluster.hosts[LOST].kill()
            lost_at = made(out)
            cluster.add()
            status = process.wait(deadline_s)
        finally:
            process.kill()
    assert status in ENDED, log.read_text()
    return log.read_text(), lost_at


def made(out: Path) -> int:
    return len(list(out.glob("*/r*/arm.json")))


def wait(
    process: subprocess.Popen, until: Callable[[], bool], deadline_s: float
) -> None:
    deadline = time.monotonic() + deadline_s
    while not until():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)


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
