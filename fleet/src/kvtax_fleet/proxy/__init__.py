# SPDX-License-Identifier: Apache-2.0
"""A cache-aware reverse proxy for many vLLM instances: `kvtax proxy`."""
