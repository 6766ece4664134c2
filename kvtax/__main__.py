# SPDX-License-Identifier: Apache-2.0
"""`python -m kvtax` is the command `kvtax`."""

import sys

from kvtax.cli import main

sys.exit(main())
