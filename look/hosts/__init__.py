# SPDX-License-Identifier: Apache-2.0
"""A look at records that lie on several hosts; the only part of look that uses Ray."""
