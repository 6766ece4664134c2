# SPDX-License-Identifier: Apache-2.0
"""Cost of every connector per step on every release, and its growth along axes."""
