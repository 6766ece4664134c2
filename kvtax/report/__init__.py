# SPDX-License-Identifier: Apache-2.0
"""Reports: one document model, rendered as HTML, Markdown or text of a terminal.

Make a `document.Page`, then `render.html(page)`, `render.markdown(page)` or
`render.terminal(page)`. COLOURS and LINES are for figures that are drawn elsewhere.
"""

# Okabe and Ito (2008), colour-blind safe; yellow left out, too pale on white.
COLOURS = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
    "#7F7F7F",
)  # fmt: skip
LINES = ("-", "--", ":")
