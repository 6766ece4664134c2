# SPDX-License-Identifier: Apache-2.0
"""Restart stand-ins, as an experiment's `restart` does: python -m ... URL ..."""

import sys
import urllib.request

for url in sys.argv[1:]:
    urllib.request.urlopen(
        urllib.request.Request(f"{url}/restart", method="POST")
    ).close()
