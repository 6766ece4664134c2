# SPDX-License-Identifier: Apache-2.0
"""A cache-aware reverse proxy before many vLLM instances: `python -m fleet.proxy`."""
