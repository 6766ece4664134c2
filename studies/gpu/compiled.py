# SPDX-License-Identifier: Apache-2.0
"""Operators of vLLM, by name: what stands for its compiled parts where there are none.

`studies.gpu.pack` writes this as vllm/_C.py, with the names that vLLM's sources have.
Modules look the names up as they are imported. Most cannot be called.
"""

from __future__ import annotations

from typing import Any

import torch

# Replaced by what vLLM's sources have: {namespace: names}.
NAMES: dict[str, list[str]] = {}
# Nothing of CUTLASS is here; threads stay where they are; the CPU's attention is
# never called, and its plan a constant.
ANSWERS: dict[str, tuple[str, Any]] = {
    "init_cpu_threads_env": ("(str cpus) -> str", lambda cpus: ""),
    "get_scheduler_metadata": (
        "(int a, int b, int c, int d, Tensor e, ScalarType f, Tensor g, bool h, int i, "
        "str j, bool k) -> Tensor",
        lambda *_: torch.zeros(1),
    ),
}
LIBRARIES: list[Any] = []


def define(namespace: str, name: str) -> None:
    """Define one operator."""
    library = torch.library.Library(namespace, "FRAGMENT")
    LIBRARIES.append(library)
    asks = name.startswith("cutlass_") and "support" in name
    usual = ("(int capability) -> bool", lambda _: False) if asks else None
    schema, answer = ANSWERS.get(name, usual or ("(Tensor a) -> Tensor", None))
    library.define(f"{name}{schema}")
    if answer is not None:
        library.impl(name, answer, "CompositeExplicitAutograd")


for of_namespace, names in NAMES.items():
    for operator in names:
        define(of_namespace, operator)
