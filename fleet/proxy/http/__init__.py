# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 on both sides of the proxy: httptools (llhttp, in C) parses."""
