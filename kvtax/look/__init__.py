# SPDX-License-Identifier: Apache-2.0
"""Cost of a connector in a server under its own traffic, from the records it wrote."""
