# SPDX-License-Identifier: Apache-2.0
"""Replay a trace against an OpenAI-compatible server: open loop across sessions, closed
loop inside one. Run it as a process of its own: `kvtax fleet replay --help`.
"""
