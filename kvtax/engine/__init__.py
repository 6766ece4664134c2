# SPDX-License-Identifier: Apache-2.0
"""vLLM: its environments, overlays, and servers that leave nothing behind."""


class ServerError(Exception):
    """The server cannot start, did not start, or is another than the one started."""

    exit_code = 3


class InstallationError(ServerError):
    """There is no usable Python with vLLM where one was named."""

    exit_code = 2
