# SPDX-License-Identifier: Apache-2.0
"""Colours and line styles of all figures."""

# Okabe and Ito (2008), colour-blind safe; yellow left out, too pale on white.
COLOURS = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
    "#7F7F7F",
)  # fmt: skip
LINES = ("-", "--", ":")
