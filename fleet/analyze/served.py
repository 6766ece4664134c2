# SPDX-License-Identifier: Apache-2.0
"""Which instance served which request, as the instances themselves recorded it.

Our proxy says so in its answers; other routers do not. Where the instances wrote
engine_request.jsonl (patch request_timing), a request is found there by its
`X-Request-Id`, which the router must have passed on.
"""

from __future__ import annotations

from pathlib import Path

from lab.records import RecordsError
from lab.records.engine_requests import ids_of_completion, read_engine_requests
from lab.records.replay import ReplayedRequest, in_header


def name_instances(requests: list[ReplayedRequest], instances: Path) -> None:
    """Fill in `instance` of the requests that a folder below `instances` knows.

    Of a request that a router sent twice, the instance that got it last. Raises
    RecordsError.
    """
    served: dict[str, tuple[int, str]] = {}
    hashed = True
    for path in sorted(instances.glob("*/engine_request.jsonl")):
        lines = read_engine_requests(path)
        if lines.header is None:
            raise RecordsError(f"{path}:1: no header line")
        hashed = lines.header.ids == "hashed"
        for one in lines.records:
            arrived = one.arrival_ns, path.parent.name
            served[one.id] = max(served.get(one.id, arrived), arrived)
    for request in requests:
        _, name = served.get(
            ids_of_completion(in_header(request.id))[hashed], (0, None)
        )
        request.instance = name
