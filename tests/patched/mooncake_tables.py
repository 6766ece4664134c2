# SPDX-License-Identifier: Apache-2.0
"""Names of the scenarios of Mooncake's aborts, known without vLLM.

The scenarios are functions of abort_lab.py."""

from __future__ import annotations

# Upstream does these right; the fix must not break them.
RIGHT_UPSTREAM = ["aborted_while_waiting", "aborted_while_sending", "nothing_fails"]
WRONG_UPSTREAM = [
    "aborted_before_scheduled",
    "pull_failed_and_is_recomputed",
    "pull_failed_and_fails_the_request",
    "pull_failed_after_abort",
    "prefiller_not_found",
    "prefills_aborted_together",
    "prefill_aborted_before_scheduled_while_decoder_waits",
    "prefills_aborted_alone",
    "fewer_blocks_than_wanted",
]
SCENARIOS = RIGHT_UPSTREAM + WRONG_UPSTREAM
# Run with the policy that fails a request; all others recompute the prompt.
FAILING = ["pull_failed_and_fails_the_request"]
# What only this block puts right, so it is nothing for a release that has it not. But
# aborted_before_scheduled must be right there too: upstream has fixed it.
FIXED_BY = {
    "aborted_before_scheduled": "empty_pull",
    "pull_failed_and_is_recomputed": "fail_pulls",
    "pull_failed_and_fails_the_request": "fail_pulls",
    "pull_failed_after_abort": "fail_pulls",
    "prefiller_not_found": "no_bootstrap",
    "fewer_blocks_than_wanted": "fail_pulls",
}
# Where the decoder must make something of the prefiller's refusal.
REFUSED = [
    "prefills_aborted_together",
    "prefill_aborted_before_scheduled_while_decoder_waits",
]
# For blocks of the patch, a scenario that goes wrong without them. What else each block
# is for shows between workers of all releases: tests/patches/test_mooncake_protocol.py.
NOTICES = {
    "empty_pull": "aborted_before_scheduled",
    "invalid_block_ids": "nothing_fails",
    "load_errors": "pull_failed_and_is_recomputed",
    "fail_pulls": "pull_failed_and_is_recomputed",
    "failed_answer": "pull_failed_and_is_recomputed",
    "no_bootstrap": "prefiller_not_found",
}
