# SPDX-License-Identifier: Apache-2.0
"""run_all.sh --connector: along which axes does it grow, and then the sweep.

The axes take a minute and answer first. They need the CPU's vLLM, so a profile for GPUs
has the sweep alone. So has a connector that cannot be held at the axes' levels.
"""

from __future__ import annotations

import argparse
import sys

from lab.config import ConfigError
from microbench import sweep
from microbench.profile import load_profile
from observatory import gate
from observatory.limits import read_limits


def main() -> int:
    """The exit status: 1 if a limit is broken along an axis or in the sweep."""
    arguments = sweep.parse_arguments()
    if arguments.check or not _on_cpu(arguments.profile):
        return sweep.main()
    status = gate.main(_of_gate(arguments))
    if status == gate.BAD_INPUT:
        return status
    if status == gate.NOT_STARTED:
        if arguments.limits and read_limits(arguments.limits).axes:
            return status
        # In one process, with 131,072 tokens of context: a server may not need that.
        print("run_all: it is not known along other axes; the sweep decides alone")
        status = gate.KEPT
    return sweep.main() or status


def _on_cpu(profile: str) -> bool:
    try:
        return load_profile(profile).flavour == "cpu"
    except ConfigError:
        return False  # the sweep says what is wrong


def _of_gate(arguments: argparse.Namespace) -> list[str]:
    """The options that the gate has as well."""
    python = ["--vllm", arguments.vllm] if arguments.vllm else []
    told = [*python, "--connector", arguments.connector]
    if not python:
        told += ["--python", arguments.python]
    if arguments.connector_config:
        told += ["--connector-config", arguments.connector_config]
    if arguments.limits:
        told += ["--limits", str(arguments.limits)]
    return told


if __name__ == "__main__":
    sys.exit(main())
