# SPDX-License-Identifier: Apache-2.0
"""Results of many hosts in one place that all of them reach; README.md says how."""
