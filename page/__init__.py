# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML file that opens from a disk, with no network.

`document.py` says what a page can hold, `build.py` writes it, and `assets/` shows it in
the browser. Who wants a page makes a document; nobody writes HTML.
"""
