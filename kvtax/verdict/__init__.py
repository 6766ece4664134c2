# SPDX-License-Identifier: Apache-2.0
"""From the files of a run to per_config.json: it reads files and starts nothing."""
