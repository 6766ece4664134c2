# SPDX-License-Identifier: Apache-2.0
"""Check the series in patches/upstream against the vLLM releases they are for."""
