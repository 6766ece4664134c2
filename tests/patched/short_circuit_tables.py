# SPDX-License-Identifier: Apache-2.0
"""What could be wrong with mooncake_get_finished_short_circuit, known without vLLM."""

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
