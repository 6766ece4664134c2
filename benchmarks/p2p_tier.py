# SPDX-License-Identifier: Apache-2.0
"""The wait of a peer for KV of an instance that is busy with engine steps.

vLLM's P2P tier of CPU memory answers peers in each engine step, and from 0.33.0 on also
between steps, in a thread of its own. A source steps in a fixed time; idle peers look
prompts up, and pull them. Tiering manager, P2P tier, sessions and ZMQ are vLLM's own,
in one process; the transfer is a copy of memory, done 2 ms after it began. A pull is
timed from the request to the last block, and its bytes are compared. Prints Markdown
and writes it with JSON; intervals are 95 %, from resampling rounds.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from benchmarks.results import configure_rounds, publish, turns
from kvtax.engine.engine_process import WorkerProcess, serve
from kvtax.engine.environment import engine_environment
from kvtax.engine.installation import Installation
from kvtax.engine.releases import release, source_package
from kvtax.engine.settings import CPU_ENGINE
from kvtax.patcher import Tree
from kvtax.proc.ports import reserve
from kvtax.report.markdown import table
from kvtax.stats import Estimate
from kvtax.stats.resampling import over_rounds, ratio

RELEASE = "0.32.0"
MIN_ROUNDS = 4
STEP_MS = (10, 50, 200)
PEERS = (1, 4)
PULLS = 4
HOST = "127.0.0.1"
CHUNKS, CHUNK_BYTES = 16, 4_096
# A chunk of a real model is larger; its transfer is not what is measured here.
TRANSFER_S = 0.002
# An idle engine with pending work sleeps for so long after each step.
IDLE_STEP_S = 0.001
HANGS_S = 120.0

PER_STEP, BETWEEN = "in each step", "also between steps"


class Arm(NamedTuple):
    """One vLLM, and when its source answers."""

    version: str
    answers: str


class Round(NamedTuple):
    """Pulls of one source's peers, and the costs of that source."""

    pull_ms: list[float]
    # The source's engine steps that began during each pull.
    pull_steps: list[int]
    hook_us: float
    thread_share: float


class Row(msgspec.Struct):
    """One arm with so many peers, at one step time: medians, and a mean of steps."""

    version: str
    answers: str
    step_ms: int
    peers: int
    pulls: int
    pull_ms: Estimate
    pull_steps: Estimate
    # The tier's call in the source's engine step; a lock's wait is in it.
    hook_us: Estimate
    # The polling thread's CPU time, a share of one core.
    thread_share: Estimate
    # How many times as long as between steps, with the same vLLM.
    times_between: Estimate | None = None


@contextmanager
def workers(
    sources: list[str],
) -> Iterator[tuple[dict[str, WorkerProcess], Installation]]:
    """Start a worker for each vLLM, by its version. Raises ServerError."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found: dict[str, WorkerProcess] = {}
        for number, source in enumerate(sources):
            of = Path(folder, str(number))
            is_path = (Path(source) / "vllm" / "__init__.py").exists()
            installed = release(RELEASE if is_path else source)
            vllm, beside = installed.package("vllm"), None
            if is_path:
                beside = of / "sources"
                vllm = source_package(Path(source) / "vllm", vllm, beside)
            ports = reserve(1)[0]
            env = engine_environment(None, CPU_ENGINE, ports, installed, beside)
            worker = WorkerProcess(
                of, "benchmarks.p2p_tier", env=env, installed=installed
            )
            found[Tree(vllm).version or source] = stack.enter_context(worker)
        for worker in found.values():
            worker.wait_ready()
        yield found, installed


def measure(processes: dict[str, WorkerProcess], rounds: int) -> list[Row]:
    """Measure all arms in all cases, in turn."""
    arms = [
        Arm(version, answers)
        for version, process in processes.items()
        for answers in process.ask("ways")
    ]
    rows = []
    for step_ms, peers in product(STEP_MS, PEERS):
        made: dict[Arm, list[Round]] = {arm: [] for arm in arms}
        for number, arm in turns(arms, rounds):
            request = "pulls", arm.answers == BETWEEN, step_ms, peers, number
            answer = processes[arm.version].ask(*request, timeout_s=HANGS_S)
            made[arm].append(Round(*answer))
        for arm in arms:
            rows.append(row(arm, step_ms, peers, made[arm]))
            between = made.get(Arm(arm.version, BETWEEN))
            if arm.answers == PER_STEP and between:
                medians = [
                    np.array([np.median(of.pull_ms) for of in rounds_])
                    for rounds_ in (made[arm], between)
                ]
                rows[-1].times_between = Estimate.of(ratio(*medians))
    return rows


def row(arm: Arm, step_ms: int, peers: int, rounds: list[Round]) -> Row:
    """Sum up the rounds of an arm in one case."""
    pulls = np.array([of.pull_ms for of in rounds])
    return Row(
        *arm,
        step_ms,
        peers,
        pulls.size,
        Estimate.of(over_rounds(pulls)),
        Estimate.of(over_rounds(np.array([of.pull_steps for of in rounds]), np.mean)),
        Estimate.of(over_rounds(np.array([of.hook_us for of in rounds]))),
        Estimate.of(over_rounds(np.array([of.thread_share for of in rounds]))),
    )


def report(rows: list[Row]) -> list[str]:
    """Return the parts of the page."""
    head = ["step, ms", "peers", "vLLM", "the source answers", "pull, ms"]
    head += ["its steps meanwhile", "times between", "hook, us", "thread, %", "pulls"]
    body = [
        [
            str(of.step_ms),
            str(of.peers),
            of.version,
            of.answers,
            f"{of.pull_ms:,.0f}",
            f"{of.pull_steps:.2f}",
            f"{of.times_between:.1f}" if of.times_between else "",
            f"{of.hook_us:.0f}",
            f"{100 * of.thread_share.value:.1f}" if of.thread_share.value else "",
            str(of.pulls),
        ]
        for of in rows
    ]
    return [table(head, body)]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench p2p_tier`."""
    parser.add_argument(
        "--vllm",
        action="append",
        metavar="PATH",
        help="a checkout or source release of vLLM, or a release that is installed; "
        f"may be repeated (default {RELEASE}, whose packages a PATH uses)",
    )
    configure_rounds(parser, "p2p_tier", 8, MIN_ROUNDS)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    sources = arguments.vllm or [RELEASE]
    with workers(sources) as (processes, installed):
        rows = measure(processes, arguments.rounds)
    results = {"rows": rows}
    return publish("p2p_tier", arguments.out, report(rows), results, {}, installed)


# The worker: a source that steps, and peers.


def use_memory() -> None:
    """Have P2P tiers copy memory within this process, and ask for no model."""
    from vllm.v1.kv_offload.tiering.p2p import manager
    from vllm.v1.kv_offload.tiering.p2p.data.base import DataTransport, PollResult

    class MemoryTransport(DataTransport):
        """Copies of memory of this process, each done after TRANSFER_S."""

        agents: ClassVar[dict[str, Any]] = {}

        def __init__(self, name: str, view: memoryview, **_: Any) -> None:
            super().__init__(view)
            self.name, self.blocks = name, np.asarray(view)
            self.agents[name] = self
            self._peers: dict[str, Any] = {}
            self._ends_s: dict[int, tuple[str, float]] = {}
            self._ids = count()

        def get_agent_metadata(self) -> bytes:
            return self.name.encode()

        def add_remote_peer(
            self, peer_id: str, agent_metadata: bytes, **_: Any
        ) -> None:
            self._peers[peer_id] = self.agents[agent_metadata.decode()]

        def remove_remote_peer(self, peer_id: str) -> None:
            self._peers.pop(peer_id, None)

        def write_blocks(
            self, peer_id: str, local_idxs: list[int], remote_idxs: list[int]
        ) -> int | None:
            self._peers[peer_id].blocks[remote_idxs] = self.blocks[local_idxs]
            transfer = next(self._ids)
            self._ends_s[transfer] = peer_id, time.monotonic() + TRANSFER_S
            return transfer

        def poll(self, peer_id: str | None = None) -> PollResult:
            now_s = time.monotonic()
            done = [
                transfer
                for transfer, (peer, end_s) in self._ends_s.items()
                if peer_id in (None, peer) and end_s <= now_s
            ]
            self.cancel(done)
            return PollResult(done=done, failed=())

        def cancel(self, transfer_ids: Any, mode: str = "immediate") -> list[int]:
            for transfer in transfer_ids:
                self._ends_s.pop(transfer, None)
            return []

        def close(self) -> None:
            self.agents.pop(self.name, None)

    manager.NixlTransport = MemoryTransport
    run_config = SimpleNamespace(get_run_config=dict)
    manager.FileMapper = SimpleNamespace(from_offloading_spec=lambda **_: run_config)


class Instance:
    """A tiering manager with `chunks` of CPU memory and the P2P tier."""

    def __init__(self, chunks: int, port: int, between: bool) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext
        from vllm.v1.kv_offload.tiering import manager
        from vllm.v1.kv_offload.tiering.p2p.manager import P2PSecondaryTierManager

        self.port = port
        self.memory = np.zeros((chunks, CHUNK_BYTES), dtype=np.int8)
        region = SimpleNamespace(
            create_kv_memoryview=lambda: memoryview(self.memory), cleanup=lambda: None
        )
        primary = manager.CPUPrimaryTierOffloadingManager(chunks, region)
        parallel = SimpleNamespace(data_parallel_index=0)
        spec = SimpleNamespace(
            config=SimpleNamespace(parallel=parallel), blocks_per_chunk=1
        )
        view = primary.get_kv_memoryview()
        tier = P2PSecondaryTierManager(spec, view, host=HOST, port=port)
        # 0.32 waits without an end for messages to peers that are gone.
        tier._control._zmq_ctx.linger = 0
        setting = {} if between or not can_poll() else {"tier_poll_interval_s": 0}
        self.manager = manager.TieringOffloadingManager(primary, [tier], **setting)
        self.primary = primary
        self._nothing = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())

    @property
    def locked(self) -> AbstractContextManager:
        """The manager's lock, as the connector's scheduler takes it; 0.32 has none."""
        return getattr(self.manager, "lock", None) or nullcontext()

    def end_schedule(self) -> None:
        """Make the last call of an engine step."""
        self.manager.on_schedule_end(self._nothing)


def can_poll() -> bool:
    """Tell whether this vLLM has a thread that answers between steps."""
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

    return hasattr(TieringOffloadingManager, "poll_tiers")


def ways(_: None) -> list[str]:
    """List when a source of this vLLM can answer."""
    return [PER_STEP, BETWEEN] if can_poll() else [PER_STEP]


def keys_of(peer: int, pull: int) -> list[Any]:
    """Make the keys of a prompt that one peer pulls once."""
    from vllm.v1.kv_offload.base import make_offload_key

    name = f"{peer}.{pull}".encode()
    return [make_offload_key(name + b".%d" % at, 0) for at in range(CHUNKS)]


def chunks_of(instance: Instance, keys: list[Any], context: Any) -> np.ndarray:
    """Return a copy of the bytes that an instance holds for keys."""
    spec = instance.primary.prepare_load(keys, context)
    found = instance.memory[spec.chunk_ids].copy()
    instance.primary.complete_load(keys, context)
    return found


class Source(Instance):
    """An instance that holds all prompts and steps in `step_s`."""

    def __init__(self, peers: int, port: int, between: bool, step_s: float) -> None:
        from vllm.v1.kv_offload.base import ReqContext

        prompts = [keys_of(*of) for of in product(range(peers), range(1 + PULLS))]
        super().__init__(CHUNKS * len(prompts), port, between)
        random_bytes = np.random.default_rng(0).integers(-128, 128, self.memory.shape)
        self.memory[:] = random_bytes
        self.context = ReqContext(req_id="stored")
        for keys in prompts:
            assert self.primary.prepare_store(keys, self.context)
            self.primary.complete_store(keys, self.context, True)
        self.hook_us: list[float] = []
        self.steps = 0
        self._step_s, self._ended = step_s, threading.Event()
        self._thread = threading.Thread(target=self._steps)

    def _steps(self) -> None:
        while not self._ended.is_set():
            self.steps += 1
            began_ns = time.perf_counter_ns()
            with self.locked:
                self.end_schedule()
            self.hook_us.append((time.perf_counter_ns() - began_ns) / 1e3)
            # The forward: the host waits for the device.
            self._ended.wait(self._step_s)

    def polling_s(self) -> float:
        """Return the CPU time of the manager's polling thread so far."""
        thread = getattr(self.manager, "_tier_poll_thread", None)
        if thread is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    def __enter__(self) -> Source:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()
        self.manager.shutdown()


class Peer(Instance):
    """An idle instance that pulls one prompt after the other."""

    def __init__(self, number: int, port: int, between: bool) -> None:
        super().__init__(2 * CHUNKS, port, between)
        self.number, self.pulls = number, 0
        self.pull_ms: list[float] = []
        self.pull_steps: list[int] = []
        self._context: Any = None

    def begin(self, source: Source) -> None:
        """Open the next request."""
        from vllm.v1.kv_offload.base import ReqContext

        name = f"{self.number}.{self.pulls}"
        at = {"remote_host": HOST, "remote_port": source.port, "kv_request_id": name}
        self._began_s, self._began_step = time.monotonic(), source.steps
        self._context = ReqContext(name, {"remote_kv_source": at})
        self._keys = keys_of(self.number, self.pulls)
        with self.locked:
            self.manager.on_new_request(self._context)

    def step(self, source: Source) -> bool:
        """Take an engine step; return whether the request ended in it."""
        from vllm.v1.kv_offload.base import LookupResult

        with self.locked:
            found = set()
            if self._context is not None:
                look_up = self.manager.lookup
                found = {look_up(key, self._context) for key in self._keys}
            self.end_schedule()
            assert LookupResult.MISS not in found, "the source has every prompt"
            if found != {LookupResult.HIT}:
                return False
            self.pull_ms.append((time.monotonic() - self._began_s) * 1e3)
            self.pull_steps.append(source.steps - self._began_step)
            pulled = chunks_of(self, self._keys, self._context)
            self.manager.on_request_finished(self._context)
        with source.locked:
            assert (pulled == chunks_of(source, self._keys, source.context)).all()
        self.pulls, self._context = self.pulls + 1, None
        return True


def pulls(_: None, between: bool, step_ms: int, peers: int, seed: int) -> tuple:
    """Have each peer pull PULLS prompts, after one that connects it: Round's fields."""
    chance, step_s = random.Random(seed), step_ms / 1e3
    ports = [of.http for of in reserve(1 + peers)]
    with ExitStack() as stack:
        source = stack.enter_context(Source(peers, ports[0], between, step_s))
        idle = [Peer(*of, between) for of in enumerate(ports[1:])]
        for peer in idle:
            stack.callback(peer.manager.shutdown)
            peer.begin(source)
        while not all([peer.pulls or peer.step(source) for peer in idle]):
            time.sleep(IDLE_STEP_S)
        for peer in idle:
            peer.pull_ms.clear()
            peer.pull_steps.clear()
        source.hook_us.clear()
        began_s, polled_s = time.monotonic(), source.polling_s()
        # Each at its own moment of the source's step.
        at_s = {peer: began_s + chance.random() * step_s for peer in idle}
        while at_s:
            for peer in list(at_s):
                if at_s[peer] is not None and time.monotonic() >= at_s[peer]:
                    peer.begin(source)
                    at_s[peer] = None
                if peer.step(source):
                    at_s[peer] = time.monotonic() + chance.random() * step_s
                    if peer.pulls > PULLS:
                        del at_s[peer]
            time.sleep(IDLE_STEP_S)
        took_s = time.monotonic() - began_s
        share = (source.polling_s() - polled_s) / took_s
        pull_ms = [ms for peer in idle for ms in peer.pull_ms]
        pull_steps = [steps for peer in idle for steps in peer.pull_steps]
        # No Round: the other process knows no class of this one's __main__.
        return pull_ms, pull_steps, float(np.median(source.hook_us)), share


if __name__ == "__main__":
    use_memory()
    serve(None, sys.argv[-1], ways, pulls)
