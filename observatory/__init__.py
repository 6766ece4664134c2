# SPDX-License-Identifier: Apache-2.0
"""What every connector costs per step on every release, and what it grows with."""
