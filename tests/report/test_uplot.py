# SPDX-License-Identifier: Apache-2.0
"""What draws the figures is what its authors published."""

from __future__ import annotations

import hashlib

from kvtax.report.render import UPLOT

# Of the files in the npm package uplot 1.6.32.
SHA256 = {
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": (
        "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    ),
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def test_the_files_are_those_of_the_package():
    found = {
        name: hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() for name in SHA256
    }
    assert found == SHA256
