# SPDX-License-Identifier: Apache-2.0
"""Errors of stores, for those who must not import fsspec."""


class StoreError(Exception):
    """The store cannot be used, or does not hold what it should; says which and why."""
