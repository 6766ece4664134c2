# SPDX-License-Identifier: Apache-2.0
"""Open-loop load driver: sends every request at its scheduled time, whatever the
server does, and writes exactly one record for each. Run it as a process of its own:
`python -m microbench.driver --help`.
"""
