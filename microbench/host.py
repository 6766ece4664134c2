# SPDX-License-Identifier: Apache-2.0
"""Measures the rounds of a sweep that its host is asked for, one after the other.

lab.hosts.agent starts it, as python -m microbench.host FOLDER.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec

from lab.config import ConfigError
from lab.hosts.asked import REFUSED, Asked
from lab.hosts.fit import Unfit, as_without_ray
from lab.records.documents import write_whole
from lab.serving import provenance
from lab.serving.errors import ServerError
from lab.serving.installation import Installation, installation
from lab.serving.machine_lock import MachineBusy, machine_lock
from lab.serving.preflight import PreflightError, check_machine
from lab.serving.releases import release
from lab.serving.supervise import exit_on_signals
from microbench.profile import Profile
from microbench.workshop import Workshop, workshop

JOB = "job.json"
PROVENANCE = "provenance.json"
WATCH_EVERY_S = 1.0


class Job(msgspec.Struct, frozen=True):
    """The sweep; `python` and `vllm` are its options, `packages` the first host's."""

    profile: Profile
    python: str | None
    vllm: str | None
    packages: dict[str, str]

    def installed(self) -> Installation:
        """The vLLM to be measured, on this host. Raises ServerError."""
        if self.vllm is not None:
            return release(self.vllm)
        return installation(self.python or sys.executable)


class Round(msgspec.Struct, frozen=True):
    """One repeat of all configs of the sweep."""

    repeat: int


ERRORS = (Unfit, ConfigError, MachineBusy, PreflightError, ServerError)


def main() -> int:
    folder = Path(sys.argv[1])
    exit_on_signals()
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)
    asked = Asked(folder)
    try:
        as_without_ray()
        installed = job.installed()
        found = provenance.collect({}, "bash run_all.sh --ray", installed)
        require(found["package_versions"], job.packages)
        with ExitStack() as stack:
            stack.enter_context(machine_lock())
            check_machine(job.profile, installed=installed)
            shop = stack.enter_context(
                workshop(folder / "shop", job.profile, installed)
            )
            while asked.open:
                for number, content in asked.come(WATCH_EVERY_S):
                    one = msgspec.json.decode(content, type=Round)
                    made = folder / "rounds" / str(number)
                    _measure(shop, one, made)
                    write_whole(made / PROVENANCE, msgspec.json.encode(found))
                    asked.done(number, made)
    except ERRORS as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


def _measure(shop: Workshop, one: Round, made: Path) -> None:
    for planned in shop.round(one.repeat):
        trial = shop.run(made / planned.folder, planned)
        print(planned.folder, trial.status, trial.error or "", flush=True)


def require(here: dict[str, str], packages: dict[str, str]) -> None:
    """The packages `here` must be those of the first host. Raises Unfit."""
    for name in sorted(here.keys() | packages.keys()):
        if here.get(name) != packages.get(name):
            raise Unfit(
                f"{name} is {here.get(name)} there, and {packages.get(name)} on the "
                "first host"
            )


if __name__ == "__main__":
    sys.exit(main())
