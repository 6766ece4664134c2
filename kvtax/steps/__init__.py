# SPDX-License-Identifier: Apache-2.0
"""Step files read, and steps split into parts."""
