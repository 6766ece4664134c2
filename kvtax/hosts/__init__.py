# SPDX-License-Identifier: Apache-2.0
"""Work on the hosts of a Ray cluster; README.md says how."""
