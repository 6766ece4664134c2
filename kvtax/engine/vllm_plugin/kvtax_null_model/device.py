# SPDX-License-Identifier: Apache-2.0
"""A null device: the null model's forward runs beside the host, as a GPU's does.

Launching returns at once. The device runs one forward after the other, and the host
waits for a result where vLLM waits for a GPU's, without the GIL. So vLLM's own
asynchronous scheduling works without a GPU.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from kvtax_null_model.forward import SimulatedForward

if TYPE_CHECKING:
    from vllm.kvtax_probe.files import RecordFile
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

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


class NullDeviceExecutor(UniProcExecutor):
    """One step after the other: the host waits for each forward."""

    overlapping = False

    def _init_executor(self) -> None:
        super()._init_executor()
        worker = self.driver_worker.worker
        # vLLM declares any module there, where it puts a model runner.
        runner = cast("GPUModelRunner", worker.model_runner)
        model = cast("NullForCausalLM", runner.model)
        # The model's own, until the device takes its place.
        simulated = cast("SimulatedForward | None", model.simulated)
        self._device = NullDevice(simulated or SimulatedForward(0, 0, 0))
        model.simulated = self._device
        sample = worker.sample_tokens

        def sample_tokens(*told):
            output = NullOutput(sample(*told), self._device.free_ns)
            return output if self.overlapping else output.get_output()

        # A method of this one worker is replaced, which mypy cannot follow.
        worker.sample_tokens = sample_tokens  # type: ignore[method-assign]

    def execute_model(self, scheduler_output, non_block: bool = False):
        self._device.step_id = getattr(scheduler_output, "step_id", None)
        self._device.life = getattr(scheduler_output, "records_life", None)
        return super().execute_model(scheduler_output, non_block)


class OverlappingNullDeviceExecutor(NullDeviceExecutor):
    """With vLLM's asynchronous scheduling: a step is scheduled while one runs.

    The CPU's model runner is made without, as it has no streams; the scheduler and the
    engine's loop, which are made after it, are those of a GPU.
    """

    overlapping = True
    max_concurrent_batches = 2

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
