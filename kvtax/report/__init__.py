# SPDX-License-Identifier: Apache-2.0
"""Reports: one document model, rendered as HTML, Markdown, terminal text or PNG.

Make a `document.Page`, then `render.html(page)`, `render.markdown(page)` or
`render.terminal(page)`; `png.draw(figure, path)` for a figure alone.
"""
