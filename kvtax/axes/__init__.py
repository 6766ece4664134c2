# SPDX-License-Identifier: Apache-2.0
"""Cost of every connector per step on every release, and its growth along axes."""

# The variable with what the worker is given; a command line would show its secrets.
GIVEN = "KVTAX_CELL"
