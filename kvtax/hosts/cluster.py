# SPDX-License-Identifier: Apache-2.0
"""Spreads tasks over the hosts of a Ray cluster; each is done once."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.authentication.authentication_token_setup import (
    ensure_token_if_auth_enabled,
)
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvtax.hosts.agent import Agent
from kvtax.hosts.code import Code, code, differences
from kvtax.hosts.errors import HostRefused, HostsError
from kvtax.hosts.progress import Progress
from kvtax.hosts.results import Place, PlaceOf, Result, nowhere
from kvtax.proc.supervise import SIGNALS

# Each core has another task waiting, so that it need not wait for one.
TASKS_PER_CORE = 2
# Of one agent at a time: each is a thread there.
MOST_CALLS = 300
NODES_EVERY_S = 1.0
WAIT_S = 0.2
# An agent answers at once; one that takes so long hangs.
SILENT_S = 60.0
# So long without any host is too long.
NO_HOST_S = 60.0
# A task whose hosts were lost so often may be what ends them.
MOST_LOST = 3
CLOSE_S = 30.0
CONNECT_S = 10.0
LOOPBACK = ("127.", "::1")
# Raises an error if the cluster wants a token.
STRANGER = "import sys, ray._raylet as r; r.GcsClient(address=sys.argv[1])"


@dataclass(eq=False)
class Host:
    """A node of the cluster with an agent; `slots` is 0 until it has answered.

    `lost` says why, once it is used no more.
    """

    name: str
    agent: Any
    slots: int = 0
    doing: dict[Any, int] = field(default_factory=dict)
    asked: Any = None
    asked_at_s: float = 0.0
    lost: str | None = None

    def begin(self, task: int, content: bytes, place: Place | None = None) -> None:
        """Have it do a task, known to whoever asks for it by this number."""
        self.doing[self.agent.run.remote(content, place)] = task


@dataclass
class _Leaving:
    """An agent that is used no more, and how long it may take to clean up."""

    agent: Any
    closing: Any
    until_s: float


def spread(
    address: str,
    module: str,
    files: dict[str, bytes],
    tasks: Sequence[bytes],
    alone: bool = False,
    place: PlaceOf = nowhere,
    progress: Progress | None = None,
) -> Iterator[tuple[int, str, Result]]:
    """Have all `tasks` done by kvtax.hosts.agent on the hosts of the cluster.

    Yields, as they are done, a task's index, the host's name and its result. A task
    whose host is lost is done again elsewhere; hosts that come later are used, those
    with other code and those that refuse are not. With `alone` a host gets a task when
    it has none. `place` says where results are put, `progress` hears who does what.
    Raises HostsError.
    """
    progress = progress or Progress()
    with hosts_of(address, module, files, progress) as hosts:
        yield from _all_done(hosts, tasks, alone, place, progress)


@contextmanager
def hosts_of(
    address: str, module: str, files: dict[str, bytes], progress: Progress
) -> Iterator[Hosts]:
    """Yield the hosts of the cluster, each with an agent, which ends with the context.

    Raises HostsError.
    """
    with connected(address):
        hosts = Hosts(module, files, progress)
        try:
            yield hosts
        finally:
            hosts.close()


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the cluster at `address`; warn if anybody may. Raises HostsError."""
    try:
        _require_listener(address)
        _require_entry(address)
        kept = {number: signal.getsignal(number) for number in SIGNALS}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        # At SIGTERM Ray would end this process without any cleaning up.
        for number, handler in kept.items():
            signal.signal(number, handler)
    except AuthenticationError:
        raise HostsError(
            f"the Ray cluster at {address} refused the token of this command, or its "
            "lack: set RAY_AUTH_MODE=token, and have the cluster's token in "
            "~/.ray/auth_token or RAY_AUTH_TOKEN (docs/hosts.md)"
        ) from None
    except (RayError, OSError, ValueError, RuntimeError) as error:
        raise HostsError(
            f"no Ray cluster at {address}: {error}\n`ray start --head` begins one, and "
            "`ray status` says what it has"
        ) from None
    try:
        _warn_if_open(address)
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Ray would try for minutes. Raises OSError, or ValueError for no HOST:PORT."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("an address is HOST:PORT, or auto")
    socket.create_connection((host, int(port)), CONNECT_S).close()


def _require_entry(address: str) -> None:
    """Raise an error unless both cluster and command have the token, or neither.

    ray.init would try for 20 s and not say why, or join and never get a result.
    """
    # GcsClient would abort this process if it should have a token and finds none.
    ensure_token_if_auth_enabled(create_token_if_missing=False)
    found = canonicalize_bootstrap_address(address)
    GcsClient(address=found)
    if not is_token_auth_enabled():
        return
    without = os.environ | {"RAY_AUTH_MODE": "disabled"}
    asking = [sys.executable, "-c", STRANGER, str(found)]
    if subprocess.run(asking, env=without, capture_output=True).returncode == 0:
        raise HostsError(
            f"the Ray cluster at {address} asks for no token, and this command has "
            "RAY_AUTH_MODE=token: start Ray with it, too, on each host (docs/hosts.md)"
        )


def _warn_if_open(address: str) -> None:
    """Warn of a cluster that others can reach and that asks nobody for a token."""
    hosts = [node["NodeManagerAddress"] for node in ray.nodes()]
    beyond = not all(host.startswith(LOOPBACK) for host in hosts)
    if beyond and not is_token_auth_enabled():
        print(
            f"WARNING: the Ray cluster at {address} asks for no token: whoever reaches "
            "it can run anything on its hosts. Start Ray with RAY_AUTH_MODE=token on "
            "each host (docs/hosts.md)",
            file=sys.stderr,
            flush=True,
        )


def _all_done(
    hosts: Hosts,
    tasks: Sequence[bytes],
    alone: bool,
    place: PlaceOf,
    progress: Progress,
) -> Iterator[tuple[int, str, Result]]:
    left = deque(range(len(tasks)))
    lost = [0] * len(tasks)
    open_tasks = set(left)
    while open_tasks:
        hosts.look()
        for host in hosts.ready():
            most = 1 if alone else min(host.slots * TASKS_PER_CORE, MOST_CALLS - 2)
            while left and len(host.doing) < most:
                task = left.popleft()
                host.begin(task, tasks[task], place(task, host.name))
                progress.begins(host.name, task)
        for host, task, result in hosts.results():
            open_tasks.remove(task)
            progress.ends(host.name, task)
            yield task, host.name, result
        for task, counts in hosts.take_lost():
            lost[task] += counts
            if lost[task] == MOST_LOST:
                raise HostsError(
                    f"a task was lost with {MOST_LOST} hosts, the last time with "
                    f"{hosts.last_loss}"
                )
            left.appendleft(task)


class Hosts:
    """The hosts that are there now, and what they are doing."""

    def __init__(
        self, module: str, files: dict[str, bytes], progress: Progress
    ) -> None:
        self._module = module
        self._progress = progress
        self._files = ray.put(files)
        self._code = code()
        self._hosts: dict[str, Host] = {}
        self._refused: dict[str, str] = {}
        self._lost: list[tuple[int, bool]] = []
        self._leaving: dict[str, _Leaving] = {}
        self._looked_s = 0.0
        self._seen_s = time.monotonic()
        self.last_loss = ""

    def look(self) -> None:
        """See which nodes came or went, and which agents still answer."""
        now_s = time.monotonic()
        if now_s - self._looked_s < NODES_EVERY_S:
            return
        self._looked_s = now_s
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for node in self._hosts.keys() - alive.keys():
            self._lose(node, "its node left the cluster")
        self._let_go(now_s)
        used = self._hosts.keys() | self._refused.keys() | self._leaving.keys()
        for node in alive.keys() - used:
            self._hosts[node] = self._begin(node, alive[node]["NodeManagerAddress"])
        for node, host in list(self._hosts.items()):
            self._hear(node, host, now_s)
        if self._hosts:
            self._seen_s = now_s
        elif now_s - self._seen_s > NO_HOST_S:
            reasons = "; ".join(self._refused.values()) or "the cluster has no node"
            raise HostsError(f"no host for {NO_HOST_S:.0f} s: {reasons}")

    def ready(self) -> list[Host]:
        return [host for host in self._hosts.values() if host.slots]

    def settled(self) -> bool:
        """Return whether every host of the cluster has answered."""
        return len(self.ready()) == len(self._hosts) > 0

    def results(self) -> Iterator[tuple[Host, int, Result]]:
        """Return the tasks that are done; wait a moment if none is."""
        doing = {
            ref: (node, host)
            for node, host in self._hosts.items()
            for ref in host.doing
        }
        if not doing:
            time.sleep(WAIT_S)
            return
        done, _ = ray.wait(list(doing), num_returns=len(doing), timeout=0)
        if not done:
            done, _ = ray.wait(list(doing), num_returns=1, timeout=WAIT_S)
        for ref in done:
            node, host = doing[ref]
            if node not in self._hosts:
                continue
            try:
                result = ray.get(ref)
            except HostRefused as refused:
                self._refuse(node, _in_short(refused))
                continue
            except RayError as error:
                self._lose(node, _in_short(error))
                continue
            yield host, host.doing.pop(ref), result

    def take_lost(self) -> list[tuple[int, bool]]:
        """Tasks whose host was lost since last asked, and whether they may be why."""
        lost, self._lost = self._lost, []
        return lost

    def give_up(self, host: Host, why: str) -> None:
        """Use it no more as it is; what is on its node begins anew."""
        for node in [node for node, one in self._hosts.items() if one is host]:
            self._lose(node, why)

    def close(self) -> None:
        """Stop what runs on the hosts."""
        for node in list(self._hosts):
            self._part(node)
        closing = [one.closing for one in self._leaving.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for one in self._leaving.values():
            ray.kill(one.agent)

    def _begin(self, node: str, name: str) -> Host:
        agent = ray.remote(Agent).options(
            num_cpus=0,
            max_concurrency=MOST_CALLS,
            scheduling_strategy=_on(node),
        )
        self._progress.comes(name)
        return Host(name, agent.remote(self._module, self._files))

    def _hear(self, node: str, host: Host, now_s: float) -> None:
        """Ask the agent for its code, and give the host up if it does not answer."""
        if host.asked is None:
            host.asked, host.asked_at_s = host.agent.greet.remote(), now_s
            return
        if not ray.wait([host.asked], timeout=0)[0]:
            if now_s - host.asked_at_s > SILENT_S:
                self._lose(node, f"its agent did not answer for {SILENT_S:.0f} s")
            return
        try:
            its_code, host.slots = ray.get(host.asked)
        except HostRefused as refused:
            self._refuse(node, _in_short(refused))
            return
        except RayError as error:
            self._lose(node, _in_short(error))
            return
        host.asked = None
        if different := differences(self._code, its_code):
            self._refuse(node, f"it has other code: {', '.join(different)}")

    def _refuse(self, node: str, why: str) -> None:
        """Use it no more."""
        self._refused[node] = f"{self._hosts[node].name}: {why}"
        self._lose(node, why, by_a_task=False)

    def _lose(self, node: str, why: str, by_a_task: bool = True) -> None:
        host = self._part(node)
        self.last_loss = host.lost = f"{host.name}: {why}"
        self._progress.leaves(host.name, why)
        self._lost += [(task, by_a_task) for task in host.doing.values()]

    def _part(self, node: str) -> Host:
        """Have the agent clean up: Ray, when it ends one, ends its supervisor, too."""
        host = self._hosts.pop(node)
        until_s = time.monotonic() + CLOSE_S
        self._leaving[node] = _Leaving(host.agent, host.agent.close.remote(), until_s)
        return host

    def _let_go(self, now_s: float) -> None:
        """End the agents that have cleaned up, or do not come to it."""
        for node, one in list(self._leaving.items()):
            if now_s > one.until_s or ray.wait([one.closing], timeout=0)[0]:
                ray.kill(one.agent)
                del self._leaving[node]


def ask_each_host(
    address: str, ask: Callable[[Any, str], Any], about: Any
) -> Iterator[tuple[str, Any]]:
    """Yield each host's name with what `ask(about, name)` returns there.

    Or with an exception, if that went wrong or the host was lost or has other code.
    Raises HostsError.
    """
    with connected(address):
        names = {}
        for node in ray.nodes():
            if node["Alive"]:
                name = node["NodeManagerAddress"]
                remote = ray.remote(_ask).options(
                    num_cpus=0, max_retries=0, scheduling_strategy=_on(node["NodeID"])
                )
                names[remote.remote(ask, about, name, code())] = name
        while names:
            (done,), _ = ray.wait(list(names))
            try:
                answer = ray.get(done)
            except RayTaskError as error:
                answer = error.cause
            except RayError as error:
                answer = RuntimeError(_in_short(error))
            yield names.pop(done), answer


def _ask(ask: Callable, about: Any, name: str, ours: Code) -> Any:
    if different := differences(ours, code()):
        raise RuntimeError(f"it has other code: {', '.join(different)}")
    return ask(about, name)


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _in_short(error: RayError | HostRefused) -> str:
    """Describe the error without Ray's stack."""
    if isinstance(error, RayTaskError):
        return str(error.cause)
    if isinstance(error, RayActorError):
        return "its agent ended"
    return str(error)
