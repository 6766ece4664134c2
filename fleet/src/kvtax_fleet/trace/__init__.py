# SPDX-License-Identifier: Apache-2.0
"""Request traces of LLM services: read, describe, sample, turn into prompts."""

from kvtax_fleet.trace.readers import FORMATS, read_trace
from kvtax_fleet.trace.request import Request, TraceError
from kvtax_fleet.trace.trace_file import write_trace

__all__ = ["FORMATS", "Request", "TraceError", "read_trace", "write_trace"]
