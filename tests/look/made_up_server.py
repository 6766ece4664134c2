# SPDX-License-Identifier: Apache-2.0
"""Folders of records, as a patched server would have written them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

FIRST_NS = 10**13


@dataclass
class Server:
    """Steps and requests to be written; times in us."""

    folder: Path
    release: str = "0.18.1"
    steps: list[dict] = field(default_factory=list)
    workers: list[dict] = field(default_factory=list)
    requests: list[dict] = field(default_factory=list)
    now_us: float = 0.0
    header: dict = field(default_factory=dict)

    def step(
        self,
        gap_us: float = 10,
        *,
        schedule_us: float = 100,
        build_meta_us: float = 5,
        model_us: float = 2_000,
        get_finished_us: float = 20,
        update_us: float = 50,
        rest_us: float = 15,
        **counts: int,
    ) -> int:
        """A step, `gap_us` after the last one; its step_id."""
        self.now_us += gap_us
        step_id = len(self.steps)
        t_ns = FIRST_NS + round(self.now_us * 1e3)
        execute_us = model_us + get_finished_us
        step_us = schedule_us + execute_us + update_us + rest_us
        counts = {
            "running": 4,
            "waiting": 0,
            "scheduled": 4,
            "prefill_tokens": 0,
            "decode_tokens": 4,
            "cache_size": 1_000,
            "free_blocks": 5_000,
            "preemptions": 0,
        } | counts
        self.steps.append(
            {
                "step_id": step_id,
                "t_ns": t_ns,
                "schedule_us": schedule_us,
                "step_us": step_us,
                "update_us": update_us,
                "connector_calls": {"build_connector_meta": 1},
                "connector_us": {"build_connector_meta": build_meta_us},
                "connector_self_us": {"build_connector_meta": build_meta_us},
                **counts,
            }
        )
        self.workers.append(
            {
                "step_id": step_id,
                "t_ns": t_ns + round(schedule_us * 1e3),
                "execute_model_us": execute_us,
                "connector_calls": {"get_finished": 1},
                "connector_us": {"get_finished": get_finished_us},
                "connector_self_us": {"get_finished": get_finished_us},
            }
        )
        self.now_us += step_us
        return step_id

    def request(self, **fields: object) -> None:
        """Add a request; by default it arrives as the first step begins."""
        default = {"id": "a", "arrival_ns": FIRST_NS, "prompt_tokens": 5}
        self.requests.append(default | fields)

    def without_calls(self) -> Server:
        """Leave out each call of the connector, as a recorder that timed none."""
        self.header["methods"] = []
        for record in (*self.steps, *self.workers):
            for name in ("connector_calls", "connector_us", "connector_self_us"):
                del record[name]
        return self

    def ends_ns(self, step_id: int) -> int:
        step = self.steps[step_id]
        return step["t_ns"] + round(step["step_us"] * 1e3)

    def write(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        files = {
            "engine_step": (self.steps, {"methods": ["build_connector_meta"]}),
            "worker_step.r0": (self.workers, {"methods": ["get_finished"], "rank": 0}),
            "engine_request": (self.requests, {}),
        }
        for name, (records, header) in files.items():
            if name == "engine_request" and not records:
                continue
            schema = f"kvtax.{name.partition('.')[0]}/1"
            head = {"schema": schema, "vllm_version": self.release}
            head |= header | self.header
            lines = [json.dumps(record) + "\n" for record in (head, *records)]
            (self.folder / f"{name}.jsonl").write_text("".join(lines))
        return self.folder


def served(folder: Path, steps: int = 400, seed: int = 1) -> Server:
    """A server with requests that queue, are preempted, and wait for KV."""
    chance = random.Random(seed)
    server = Server(folder)
    for _ in range(steps):
        server.step(
            chance.uniform(0, 500) if chance.random() < 0.2 else 10,
            schedule_us=chance.uniform(50, 200),
            model_us=chance.uniform(1_000, 4_000),
            get_finished_us=chance.expovariate(1 / 100),
            cache_size=chance.randrange(20_000),
            running=chance.randrange(1, 60),
        )
    for number in range(steps // 8):
        first, token, last = sorted(chance.sample(range(5, steps), 3))
        arrival_ns = server.steps[first]["t_ns"] - chance.randrange(10**7)
        request = {
            "id": f"{number:016x}",
            "arrival_ns": arrival_ns,
            "prompt_tokens": chance.randrange(1, 9_000),
            "first_step": first,
            "first_token_step": token,
            "last_step": last,
            "finished_ns": server.ends_ns(last) - 2_000,
            "finish_reason": "length",
            "output_tokens": chance.randrange(1, 300),
        }
        if chance.random() < 0.3 and token - first > 4:
            left, back = sorted(chance.sample(range(first + 1, token), 2))
            request |= {"preempted_steps": [left, back], "preemptions": 1}
        if chance.random() < 0.3:
            begin = arrival_ns + chance.randrange(10**6)
            end = begin + chance.randrange(10**6)
            if end < server.steps[first]["t_ns"]:
                request["kv_wait_ns"] = [begin, end]
        server.requests.append(request)
    return server
