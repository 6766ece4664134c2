# SPDX-License-Identifier: Apache-2.0
"""Requests that are sent on time."""

from __future__ import annotations

import resource


def allow_open_files() -> None:
    """Allow as many sockets as there are requests in flight."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
