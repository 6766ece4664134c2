# SPDX-License-Identifier: Apache-2.0
"""Measures cells of the observatory that its host is asked for, one after the other.

lab.hosts.agent starts it, as python -m observatory.host FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from lab.config import ConfigError
from lab.hosts.asked import REFUSED, Asked
from lab.hosts.fit import Unfit, as_without_ray
from lab.records.documents import write_document
from lab.serving.connector import load_connector
from lab.serving.errors import ServerError
from lab.serving.machine_lock import MachineBusy, machine_lock
from lab.serving.releases import release as environment_of
from lab.serving.supervise import exit_on_signals
from microbench.host import require
from observatory.cell import measured

PACKAGES = "packages.json"
WATCH_EVERY_S = 1.0
ERRORS = (Unfit, ConfigError, MachineBusy, ServerError)

# Cells that are compared, each a release and a connector.
Cells = list[tuple[str, str]]


def main() -> int:
    folder = Path(sys.argv[1])
    exit_on_signals()
    # By release, the first host's.
    packages = msgspec.json.decode((folder / PACKAGES).read_bytes())
    asked = Asked(folder)
    try:
        as_without_ray()
        with machine_lock():
            while asked.open:
                for number, content in asked.come(WATCH_EVERY_S):
                    cells = msgspec.json.decode(content, type=Cells)
                    made = folder / "cells" / str(number)
                    _make(cells, packages, made)
                    asked.done(number, made)
    except ERRORS as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


def _make(cells: Cells, packages: dict[str, dict[str, str]], made: Path) -> None:
    """A file in `made` for each of `cells`. Raises ERRORS."""
    made.mkdir(parents=True)
    for number, (release, connector) in enumerate(cells):
        config, installed = load_connector(connector), environment_of(release)
        cell = measured(
            connector, release, config, installed, "python -m observatory --ray"
        )
        require(cell.provenance["package_versions"], packages[release])
        write_document(made / f"{number}.json", cell)
        print(release, connector, cell.error or "measured", flush=True)


if __name__ == "__main__":
    sys.exit(main())
