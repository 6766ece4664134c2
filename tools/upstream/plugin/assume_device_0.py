# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: without an accelerator, the current device is number 0.

Mooncake's worker asks for it when it is made, with its transfer engine and network
replaced; torch raises where there is none.
"""

import torch

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0
