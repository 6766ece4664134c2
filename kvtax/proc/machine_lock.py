# SPDX-License-Identifier: Apache-2.0
"""Lock of the machine for one measurement of this user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvtax.proc.user_files import LockHeld, user_lock

MEASUREMENT = "kvtax-measurement.lock"


class MachineBusy(Exception):
    """Another measurement is running here; the two would disturb each other."""

    exit_code = 4


@contextmanager
def machine_lock() -> Iterator[None]:
    """Hold the machine for one measurement. Raises MachineBusy.

    The lock is this user's, so that no other user can keep it for ever.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(user_lock(MEASUREMENT))
        except LockHeld as error:
            raise MachineBusy(
                "another sweep or experiment is running on this machine (process "
                f"{error.pid}); two would disturb each other: wait for its end"
            ) from None
        yield
