# SPDX-License-Identifier: Apache-2.0
"""Estimators that survive noisy neighbours.

On shared cores 1 to 5 % of the steps are 2 to 100 times slower than the rest, and
neighbouring steps resemble each other. So every location is a median, every slope a
median of slopes, and every interval comes from resampling blocks of neighbouring steps
(blocks), rounds (rounds) or sessions (fleet.analyze.sessions), never single steps. What
server processes differ by is known from a few of them only: there an interval is
Student's t (processes).
"""
