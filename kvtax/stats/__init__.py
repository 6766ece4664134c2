# SPDX-License-Identifier: Apache-2.0
"""Estimators that survive noisy neighbours; all of kvtax's statistics are in here.

On shared cores 1 to 5 % of the steps are 2 to 100 times slower than the rest, and
neighbouring steps resemble each other. So every location is a median, every slope a
median of slopes, and every interval comes from resampling blocks of neighbouring steps,
rounds or sessions, never single steps. Levels that are held come from few holds, each a
median or a mean without the slowest steps: their intervals are Student's t.

A result is an `Estimate`, a value with its 95 % interval; a `Distribution` has the
draws as well, so that it can be subtracted and divided. Where to find which:

distribution: `Distribution`, `f_quantile`, `t_quantile`
resampling: `resample_blocks`, `over_rounds`, `difference`, `ratio`, `added`,
    `chance_of_rise` (rare events by level)
quantiles: `weighted_quantiles`, `median_of_passes` (sign test), `SessionDraws`
    (quantiles over sessions)
median_slope: `slope_us_per_1k_blocks` (Theil-Sen in |cache|), `batch_held_us`
held: `fit` (levels of an axis that was held), `growth`, `most_rise_us`
least_squares: `jackknifed_slopes`, `share_explained_by_others`, `line_of_sums`,
    `exponent` (of a power), `least_relative_error`
latency: `latency_columns`, `tpot` (TTFT, TPOT and E2E of requests)
processes: `student`, `look_level` (looks at a run that goes on), `RunSpread`,
    `mean_over_servers`
"""

from kvtax.records.estimate import Estimate

__all__ = ["Estimate"]
