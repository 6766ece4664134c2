# SPDX-License-Identifier: Apache-2.0
"""One thing at a time that could be wrong in connectors/direct_read/ledger.py."""

MUTANTS = {
    "in flight is not excluded": ("if step > self._steps_done:", "if False:"),
    "a step too early": ("step > self._steps_done", "step > self._steps_done + 1"),
    "cached in the last step": ("self._steps_begun + 1)", "self._steps_begun)"),
    "any block will do": ("key != wanted or ", ""),
    "any hash will do": (
        "key != wanted or key is not block.block_hash",
        "key != wanted",
    ),
    "listener not waited for": ("key is not block.block_hash:", "False:"),
    "equal is not identical, lookup": (
        "key is not block.block_hash:",
        "key != block.block_hash:",
    ),
    "equal is not identical, validate": (
        "if block.block_hash is not key:",
        "if block.block_hash != key:",
    ),
    "nothing is validated": ("if block.block_hash is not key:", "if False:"),
    "not only the leading run": (
        "                break\n            num_valid",
        "                continue\n            num_valid",
    ),
    "late listener knows the map's keys": (
        "if block.block_hash is not None:",
        "if False:",
    ),
    "changing maps are not expected": ("RuntimeError, StopIteration", "KeyError"),
    "unmatched steps go on": ("self._steps_done = -NEVER", "pass"),
    "offers have no deadline": ("oldest.deadline_s > time.monotonic()", "True"),
    "any number of offers": ("len(self._held) < MAX_TOKENS", "True"),
    "any number of blocks in offers": (
        "self._num_held_blocks + num_blocks <= MAX_HELD_BLOCKS",
        "True",
    ),
    "tokens are numbers": ("secrets.randbits(62) + 1", "self.counters.lookups"),
    "one reader": ("if held.readers > 1:", "if False:"),
    "any number of readers": ("readers=held.readers - 1", "readers=held.readers"),
    "offers are never forgotten": (
        "        else:\n            self._forget(token)",
        "        else:\n            pass",
    ),
    "held blocks are not given back": ("self._num_held_blocks -= len(", "len("),
    "any number of hashes": ("hashes[:MAX_HASHES]", "hashes"),
}
