# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: the null model, which leaves out the arithmetic and nothing else.

One attention layer is declared, so that vLLM allocates KV blocks for it and hands them
to the connector; the others borrow its KV cache. A forward makes the connector's calls
of each layer, and computes nothing. Engine, scheduler, block pool, connector and
transfer engine are the real ones. The folder is put on PYTHONPATH; the `.dist-info`
beside this package is what vLLM's plugin loader finds.
"""


def register() -> None:
    from vllm import ModelRegistry

    from kvtax_null_model.model import NullForCausalLM

    # The class itself, not "module:name": the latter makes vLLM start a Python
    # process of its own just to look at the class.
    ModelRegistry.register_model("NullForCausalLM", NullForCausalLM)
