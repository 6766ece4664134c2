"""temporary"""

from __future__ import annotations
import inspect, json, types, sys
from pathlib import Path
import pytest
import test_listener as T
import listener_lab as L
from vllm.v1.core import block_pool, block_pool_listener

PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
POOL = [
    (
        'if self.listeners:\n            self.listeners.notify("on_block_cached"',
        'if False:\n            self.listeners.notify("on_block_cached"',
    ),
    ('"on_block_cached", key, block.block_id', '"on_block_cached", key, 0'),
    ("self.listeners and block is not None", "self.listeners"),
    ("self.listeners and block is not None", "False"),
    ("listeners.extend(listeners)", "listeners.extend(())"),
    ('listeners.notify("on_cache_reset")', "listeners"),
    ("BlockPoolListeners(self._cache)", "BlockPoolListeners({})"),
    ("listeners.discard(listener)", "listeners"),
    ("listeners.add(listener)", "listeners.append(listener)"),
]
MOD = [
    ("self.append(listener)", "self.insert(0, listener)"),
    ("self.append(listener)", "pass"),
    (
        "for block_id in blocks:\n                    listener",
        "for block_id in list(blocks)[:1]:\n                    listener",
    ),
    ("other is not listener", "other is listener"),
    ("self[:] = [other for other in self if other is not listener]", "self.clear()"),
    ("for listener in tuple(self):", "for listener in self:"),
    ("                self.discard(listener)\n", "                pass\n"),
    ("                self._detach(listener)\n", "                pass\n"),
    (
        "            listener.on_detached()\n        except Exception:",
        "            listener.on_detached()\n        except ArithmeticError2:",
    ),
    (
        "        self.on_cache_reset()\n\n\nclass BlockPoolListeners",
        "        pass\n\n\nclass BlockPoolListeners",
    ),
    (
        "        if self.cleared:\n            block_ids.clear()",
        "        if False:\n            block_ids.clear()",
    ),
    ("            block_ids.pop(key, None)", "            pass"),
    ("block_ids.update(self.cached)", "pass"),
    ("2 * block_pool.num_gpu_blocks", "20 * block_pool.num_gpu_blocks"),
    ("2 * block_pool.num_gpu_blocks", "0"),
    (
        "        self._changed.clear()\n        self._cleared = True\n",
        "        self._cleared = True\n",
    ),
    ("        self.is_detached = True\n", "        pass\n"),
    (
        "        self.is_detached = True\n        self._cleared = True",
        "        self.is_detached = True",
    ),
    ("if self._cleared else self._changed", "if False else self._changed"),
    (
        "            if block is not None:\n                changes.cached",
        "            if True:\n                changes.cached",
    ),
    ("                changes.evicted.append(key)", "                pass"),
    (
        "        self._changed.clear()\n        self._cleared = False\n        return changes",
        "        self._cleared = False\n        return changes",
    ),
    (
        "        self._changed.clear()\n        self._cleared = False\n        return changes",
        "        self._changed.clear()\n        return changes",
    ),
    ("cleared, self._cleared = self._cleared, False", "cleared = self._cleared"),
    ("if not (self._changed or self._cleared)", "if not self._changed"),
]


def cases(variant):
    for case in T.CASES:
        case(variant)
    for m in T.MOMENTS:
        T.check_dropped(variant, m)
    for m in T.MOMENTS:
        T.test_a_tracker_that_raises_withdraws_everything_and_reports_nothing_again(m)
    L.run_machine(variant, T.QUICK)


def test_mutants():
    res = {"alive": [], "n": 0}
    src = inspect.getsource(block_pool)
    for old, new in POOL:
        assert old in src, (old, src[src.index("listeners") - 200 :][:600])
        res["n"] += 1
        try:
            cases(L.Variant(src.replace(old, new)))
            res["alive"].append([old, new])
        except Exception:
            pass
    msrc = inspect.getsource(block_pool_listener)
    for old, new in MOD:
        assert old in msrc, old
        res["n"] += 1
        mod = types.ModuleType("mut_listener")
        sys.modules["mut_listener"] = mod
        exec(compile(msrc.replace(old, new), "m", "exec", dont_inherit=True), vars(mod))
        keep = (block_pool.BlockPoolListeners, L.Variant.tracker, L.Replica.__bases__)
        block_pool.BlockPoolListeners = mod.BlockPoolListeners
        L.Variant.tracker = mod.BlockHashTracker
        rb = L.Replica.on_detached if "on_detached" in vars(L.Replica) else None
        try:
            L.Replica.on_detached = mod.BlockPoolListener.on_detached
            cases(
                L.Variant(
                    inspect.getsource(block_pool).replace(
                        "from vllm.v1.core.block_pool_listener import",
                        "from mut_listener import",
                    )
                )
            )
            res["alive"].append([old, new])
        except Exception:
            pass
        finally:
            block_pool.BlockPoolListeners, L.Variant.tracker = keep[0], keep[1]
            del L.Replica.on_detached
    Path("/tmp/patches/mutants_l.json").write_text(json.dumps(res, indent=1))
