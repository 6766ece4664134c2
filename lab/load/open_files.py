# SPDX-License-Identifier: Apache-2.0
"""Room for as many open connections as there are requests in flight."""

import resource


def allow_open_files() -> None:
    """One socket a request in flight, and no cap on those."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
