# SPDX-License-Identifier: Apache-2.0
"""Names of the gates and switches that gated_connector.py knows."""

GATES_VARIABLE = "DIRECT_READ_GATES"
# Gates: before B asks, before it reads, in the middle of its read, before it
# validates; and in an engine step, before the forward pass.
LOOKUP, READ, MID_READ, VALIDATE, STEP = (
    "lookup",
    "read",
    "mid_read",
    "validate",
    "step",
)
# Switches: A offers blocks that are not written yet; B trusts all that it has read.
OFFER_IN_FLIGHT, TRUST_ALL = "offer_in_flight", "trust_all"
