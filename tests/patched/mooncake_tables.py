# SPDX-License-Identifier: Apache-2.0
"""Names of the scenarios and edits of Mooncake's two fixes, known without vLLM.

The scenarios are functions of abort_lab.py."""

from __future__ import annotations

# Upstream does these right; the fix must not break them.
RIGHT_UPSTREAM = [
    "aborted_while_waiting",
    "aborted_while_sending",
    "nothing_fails",
]
WRONG_UPSTREAM = [
    "aborted_before_scheduled",
    "pull_failed_and_is_recomputed",
    "pull_failed_and_fails_the_request",
    "pull_failed_after_abort",
    "prefiller_late",
    "prefiller_late_and_the_request_fails",
    "prefiller_not_found",
    "prefills_aborted_together",
    "prefill_aborted_before_scheduled_while_decoder_waits",
    "decoders_ask_after_the_abort",
    "prefills_aborted_alone",
    "asked_for_before_the_abort",
    "asked_for_after_the_abort",
    "asked_for_after_it_expired",
    "fewer_blocks_than_wanted",
    "listener_ends_while_sending",
]
SCENARIOS = RIGHT_UPSTREAM + WRONG_UPSTREAM
# Run with the policy that fails a request; all others recompute the prompt.
FAILING = ["pull_failed_and_fails_the_request", "prefiller_late_and_the_request_fails"]
# What only this block puts right, so it is nothing for a release that has it not. But
# aborted_before_scheduled must be right there too: upstream has fixed it.
FIXED_BY = {
    "aborted_before_scheduled": "empty_pull",
    "pull_failed_and_is_recomputed": "worker_load_errors",
    "pull_failed_and_fails_the_request": "worker_load_errors",
    "pull_failed_after_abort": "worker_load_errors",
    "prefiller_late": "recv",
    "prefiller_late_and_the_request_fails": "recv",
    "prefiller_not_found": "no_bootstrap",
    "fewer_blocks_than_wanted": "more_to_come",
    "listener_ends_while_sending": "end_sends",
}
# Where the decoder must make something of the prefiller's refusal.
REFUSED = [
    "prefills_aborted_together",
    "prefill_aborted_before_scheduled_while_decoder_waits",
    "decoders_ask_after_the_abort",
]
# For each block of the patch, a scenario that goes wrong without it.
NOTICES = {
    "forget_unknown": "prefills_aborted_alone",
    "wake_waiting": "asked_for_before_the_abort",
    "aborted_sends": "prefills_aborted_alone",
    "forget_aborted": "prefills_aborted_alone",
    "refuse_aborted": "asked_for_after_the_abort",
    "refused_by_name": "prefills_aborted_together",
    "refuse_expired": "asked_for_after_it_expired",
    "end_sends": "listener_ends_while_sending",
    "empty_pull": "aborted_before_scheduled",
    "import_queue": "nothing_fails",
    "import_uuid": "nothing_fails",
    "invalid_block_ids": "nothing_fails",
    "connector_load_errors": "pull_failed_and_is_recomputed",
    "worker_load_errors": "nothing_fails",
    "failed": "pull_failed_and_is_recomputed",
    "recv": "pull_failed_and_is_recomputed",
    "error_response": "pull_failed_and_is_recomputed",
    "unreported": "pull_failed_and_is_recomputed",
    "broken_connection": "pull_failed_and_is_recomputed",
    "pulled_once": "fewer_blocks_than_wanted",
    "err_reqs": "fewer_blocks_than_wanted",
    "no_bootstrap": "prefiller_not_found",
    "more_to_come": "fewer_blocks_than_wanted",
}


# What must not go unnoticed: (block, what stands there, what is put in its place).
EXPIRY = "self.next_send_expire_time <= time.perf_counter()"
EDITS = {
    "not asked after received": ("get_finished", "self.finished_recving_reqs", "False"),
    "not asked after sent": ("get_finished", "self.finished_sending_reqs", "False"),
    "not asked after expiry": ("get_finished", EXPIRY, "False"),
    "asked long before expiry": ("get_finished", EXPIRY, f"{EXPIRY} + 60"),
    "latest recorded instead of first to expire": (
        "expire_time",
        "    self.next_send_expire_time, send",
        "    send_meta.expire_time, send",
    ),
    "last left instead of first to expire": ("next_expire_time", "min(", "max("),
    "only those being sent are looked at": (
        "next_expire_time",
        "values())",
        "values() if send_meta.sending)",
    ),
}
# Blocks of the patch, each left out once.
BLOCKS = ["init", "expire_time", "next_expire_time", "get_finished"]
