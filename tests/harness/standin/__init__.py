# SPDX-License-Identifier: Apache-2.0
"""Stand-in for a vLLM instance: its HTTP surface, a simulated engine, faults on demand.

For tests of clients, proxies and routers: tests.harness.standin.process starts one.
"""
