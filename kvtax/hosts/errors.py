# SPDX-License-Identifier: Apache-2.0
"""Errors of work on hosts; to import them needs neither Ray nor fsspec."""


class HostsError(Exception):
    """The hosts cannot do the work; the message says why and what to do."""

    exit_code = 3


class HostLost(Exception):
    """A host with a task is gone; the message says which and why."""


class HostRefused(Exception):
    """The host cannot do the work; the message says why."""


class StoreError(Exception):
    """A store is unusable, or a result is missing or refused; says which and why."""

    exit_code = 3


class StoreUrlError(StoreError):
    """No store can be at the URL, or none is there to read; the message says why."""

    exit_code = 2
