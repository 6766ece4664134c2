# SPDX-License-Identifier: Apache-2.0
"""The files of a fleet run become a report, figures and analysis.json."""
