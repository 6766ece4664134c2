# SPDX-License-Identifier: Apache-2.0
"""A fleet in virtual time: vLLM's own engine cores, the proxy and the replayer on a
clock that jumps from one event to the next."""
