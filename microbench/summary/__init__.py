# SPDX-License-Identifier: Apache-2.0
"""Reports of an analysed run: SUMMARY.md, report.html and figures."""
