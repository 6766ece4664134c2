# SPDX-License-Identifier: Apache-2.0
"""The cost of direct reads, beside the engine that they read from."""
