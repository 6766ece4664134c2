# SPDX-License-Identifier: Apache-2.0
"""Streams and events of a machine without a GPU: all work on them is done at once.

The workers of connectors that keep KV in the CPU's memory take `torch`,
`current_platform` and `ops` from here. They are vLLM's own but for what needs a GPU.
"""

from types import SimpleNamespace
from typing import Any

import torch as real_torch
from vllm import _custom_ops as real_ops
from vllm.platforms import current_platform as real_platform


class Stream:
    """Holds nothing back, so there is nothing to wait for."""

    # The handle that is passed to the driver's copy.
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, _: "Stream") -> None:
        pass

    def wait_event(self, _: "Event") -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """Over as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, _: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: "Event") -> float:
        """Return ms: a time to divide by."""
        return 1.0


def nothing(*_: Any, **__: Any) -> int:
    """Do nothing in place of a copy of the driver, and report success."""
    return 0


class _Over:
    """`real` but for what is given."""

    def __init__(self, real: Any, **given: Any) -> None:
        self._real = real
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        attribute = self.__dict__[name] = getattr(self._real, name)
        return attribute


_streams = {
    "Stream": Stream,
    "current_stream": Stream,
    # A block of work on a stream.
    "stream": lambda stream: stream,
}
_cuda = _Over(real_torch.cuda, Event=Event, **_streams)
_accelerator = _Over(real_torch.accelerator, set_device_index=nothing)
torch = _Over(real_torch, Event=Event, cuda=_cuda, accelerator=_accelerator)
current_platform = _Over(real_platform, set_device=nothing, **_streams)
ops = _Over(real_ops, swap_blocks=nothing, swap_blocks_batch=nothing)
copies = SimpleNamespace(gather_kv_caches=nothing, scatter_kv_caches=nothing)
