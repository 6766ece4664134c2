# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a server."""


class ServerError(Exception):
    """The server cannot start, did not start, or is not the one we started."""
