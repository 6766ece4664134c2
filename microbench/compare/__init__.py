# SPDX-License-Identifier: Apache-2.0
"""Two runs against each other, as a cost gate: it reads files and starts nothing."""
