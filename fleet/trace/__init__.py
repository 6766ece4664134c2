# SPDX-License-Identifier: Apache-2.0
"""Request traces of LLM services: read, describe, sample, make up, make prompts."""

from fleet.trace.readers import FORMATS, read_trace
from fleet.trace.request import Request, TraceError

__all__ = ["FORMATS", "Request", "TraceError", "read_trace"]
