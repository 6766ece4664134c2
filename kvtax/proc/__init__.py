# SPDX-License-Identifier: Apache-2.0
"""Processes that leave nothing behind."""
