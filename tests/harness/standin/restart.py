# SPDX-License-Identifier: Apache-2.0
"""Restart stand-ins, as an experiment's `restart` does: python -m ... URL ..."""

import sys
import urllib.request

from kvtax.proc.loopback import open_url

for url in sys.argv[1:]:
    request = urllib.request.Request(f"{url}/restart", method="POST")
    open_url(request, 30.0).close()
