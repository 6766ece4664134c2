# SPDX-License-Identifier: Apache-2.0
"""Errors of work on hosts, for those who must not import Ray."""


class HostsError(Exception):
    """The hosts cannot do the work; the message says why and what to do."""


class HostLost(Exception):
    """A host is gone that was asked for something; the message says which and why."""


class HostRefused(Exception):
    """The host cannot do the work; the message says why."""
