# SPDX-License-Identifier: Apache-2.0
"""A null device: the null model's forward runs beside the host, as a GPU's does.

Launching returns at once. The device runs one forward after the other, and the host
waits for a result where vLLM waits for a GPU's, without the GIL. So vLLM's own
asynchronous scheduling works without a GPU.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from kvtax_null_model.forward import SimulatedForward

if TYPE_CHECKING:
    from vllm.kvtax_probe.files import RecordFile

    from kvtax_null_model.model import NullForCausalLM


class DeviceStep(msgspec.Struct, gc=False):
    """A forward: when it was launched, when it began and ended on the device."""

    step_id: int
    launched_ns: int
    began_ns: int
    ended_ns: int


class NullDevice:
    """Stand-in for a GPU's stream of kernels, in place of the model's wait.

    Where steps are recorded, each forward is a line of device_step.jsonl beside them.
    """

    def __init__(self, forward: SimulatedForward) -> None:
        self._forward = forward
        self._file: RecordFile | None = None
        self.step_id: int | None = None
        self.life: str | None = None
        self.free_ns = 0

    def wait(self, positions: torch.Tensor) -> None:
        """Launch a forward of `positions`, and do not wait."""
        launched_ns = time.perf_counter_ns()
        began_ns = max(launched_ns, self.free_ns)
        self.free_ns = began_ns + round(self._forward.duration_at_us(positions) * 1e3)
        if self.step_id is not None and self.life is not None:
            if self._file is None:
                from vllm.kvtax_probe.files import RecordFile

                schema = "kvtax.device_step/1"
                self._file = RecordFile(self.life, "device_step", schema)
            self._file.append(
                DeviceStep(self.step_id, launched_ns, began_ns, self.free_ns)
            )


@dataclass
class NullOutput(AsyncModelRunnerOutput):
    """The model's output, which is there when the device has ended its forward."""

    output: ModelRunnerOutput
    ready_ns: int

    def get_output(self) -> ModelRunnerOutput:
        time.sleep(max(self.ready_ns - time.perf_counter_ns(), 0) / 1e9)
        return self.output


class NullDeviceWorker(CPUWorker):
    """A worker with a null device: its forward takes time there.

    With vLLM's asynchronous scheduling a step is scheduled while one runs, otherwise
    the host waits for each.
    """

    def init_device(self) -> None:
        # The CPU's model runner is made without, as it has no streams; scheduler,
        # executor and the engine's loop are those of a GPU.
        scheduling = self.vllm_config.scheduler_config
        self._overlapping = scheduling.async_scheduling
        scheduling.async_scheduling = False
        super().init_device()
        scheduling.async_scheduling = self._overlapping

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        # vLLM declares any module there.
        model = cast("NullForCausalLM", self.model_runner.model)
        # The model's own, until the device takes its place.
        simulated = cast("SimulatedForward | None", model.simulated)
        self.null_device = NullDevice(simulated or SimulatedForward())
        model.simulated = self.null_device

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.rank == 0:
            self.null_device.step_id = getattr(scheduler_output, "step_id", None)
            self.null_device.life = getattr(scheduler_output, "records_life", None)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        # Whole, as the runner schedules nothing ahead.
        sampled = cast("ModelRunnerOutput", super().sample_tokens(grammar_output))
        output = NullOutput(sampled, self.null_device.free_ns)
        return output if self._overlapping else output.get_output()
