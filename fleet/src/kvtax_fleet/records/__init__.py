# SPDX-License-Identifier: Apache-2.0
"""The file formats of fleets and of experiments."""
