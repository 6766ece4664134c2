# SPDX-License-Identifier: Apache-2.0
"""What a connector costs a server under its own traffic, from the records it wrote."""
