# SPDX-License-Identifier: Apache-2.0
"""Estimators that survive noisy neighbours; all of kvtax's statistics are in here.

On shared cores 1 to 5 % of the steps are 2 to 100 times slower than the rest, and
neighbouring steps resemble each other. So an interval comes from holds, servers, rounds
or sessions, never from single steps.

A result is an `Estimate`, a value with its 95 % interval; a `Distribution` has the
draws as well, so that it can be subtracted and divided. Where to find which:

distribution: `Distribution`, `f_quantile`, `t_quantile`
quantiles: `quantile` (the one definition), `weighted_quantiles`, `slope_within_groups`
    (Theil-Sen), `median_of_passes` (sign test), `SessionDraws` (quantiles over
    sessions), `latency_columns`
held: `fit` (levels of an axis that was held), `share_between_servers`, `growth`,
    `most_rise`
resampling: `over_rounds`, `difference`, `ratio`, `added`, `chance_of_rise` (rare events
    by level)
least_squares: `jackknifed_slopes`, `share_explained_by_others`, `line_of_sums`,
    `exponent` (of a power)
processes: `student`, `look_level` (looks at a run that goes on), `RunSpread`,
    `mean_over_servers`
"""

from kvtax.records.estimate import Estimate

__all__ = ["Estimate"]
