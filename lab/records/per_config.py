# SPDX-License-Identifier: Apache-2.0
"""per_config.json: the results of a run, config by config (docs/records.md)."""

PER_CONFIG_SCHEMA = "kvtax.per_config/1"
