# SPDX-License-Identifier: Apache-2.0
"""Names of gates and switches: see gated.py."""

GATES_VARIABLE = "DIRECT_READ_GATES"
# Gates: before B asks, before it reads, when it has begun to, before it validates;
# and in an engine step, before the forward pass.
LOOKUP, READ, MID_READ, VALIDATE, STEP = (
    "lookup",
    "read",
    "mid_read",
    "validate",
    "step",
)
# Switches: A offers blocks that are not written yet, B does not ask what is valid.
OFFER_IN_FLIGHT, TRUST_ALL = "offer_in_flight", "trust_all"
