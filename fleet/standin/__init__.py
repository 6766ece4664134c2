# SPDX-License-Identifier: Apache-2.0
"""Stand-in for a vLLM instance: the same HTTP surface, a simulated engine, faults on
demand. For tests of what talks to vLLM: `python -m fleet.standin --help`.
"""
