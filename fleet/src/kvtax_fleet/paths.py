# SPDX-License-Identifier: Apache-2.0
"""The folders of the fleet bench, in a checkout or in an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_WHEEL_DATA = _PACKAGE / "data"
# Experiments name their traces below it.
FLEET = _WHEEL_DATA if _WHEEL_DATA.is_dir() else _PACKAGE.parents[1]
CONFIGS = FLEET / "configs"
