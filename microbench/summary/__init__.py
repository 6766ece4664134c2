# SPDX-License-Identifier: Apache-2.0
"""What people read of a run: SUMMARY.md and the figures, from what was analysed."""
