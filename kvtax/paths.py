# SPDX-License-Identifier: Apache-2.0
"""The folders that code needs to find, in a checkout or in an installed wheel."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
_WHEEL_DATA = PACKAGE / "data"
# The wheel carries patches/, configs/ and connectors/ inside of the package.
IN_CHECKOUT = not _WHEEL_DATA.is_dir()
REPOSITORY = PACKAGE.parent if IN_CHECKOUT else _WHEEL_DATA
CONFIGS = REPOSITORY / "configs"
PATCHES = REPOSITORY / "patches"
