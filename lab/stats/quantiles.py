# SPDX-License-Identifier: Apache-2.0
"""Weighted quantiles, and a median at a given mix of batch sizes.

Direct standardisation: each batch size weighs its share in a common mix, whatever its
share in one config, so that two configs are compared at the same batch sizes.
"""

from __future__ import annotations

import numpy as np

from lab.stats.blocks import resample_blocks
from lab.stats.estimate import REPLICATES, SEED, Estimate, Floats, Ints

HISTOGRAM_BINS = 400


def weighted_medians(ordered: Floats, weights: Floats) -> Floats:
    """Weighted median of `ordered` (n,), for each row of `weights` (rows, n)."""
    total = np.cumsum(weights, axis=1)
    middle = (total < total[:, -1:] / 2).sum(axis=1)
    medians = ordered[np.minimum(middle, len(ordered) - 1)].astype(float)
    medians[total[:, -1] <= 0] = np.nan
    return medians


def weighted_quantiles(
    values: Floats, weights: Floats, quantiles: tuple[float, ...]
) -> list[float]:
    """Smallest values at which the summed weight reaches each quantile."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    index = np.searchsorted(total, np.asarray(quantiles) * total[-1] * (1 - 1e-12))
    return [float(v) for v in values[order][np.minimum(index, len(values) - 1)]]


def mix_weights(batch: Ints, mix: dict[int, float]) -> Floats:
    """Weight of each step so that batch size b weighs mix[b] in all; 0 outside it."""
    weights = np.zeros(len(batch))
    for size, share in mix.items():
        member = batch == size
        if member.any():
            weights[member] = share / member.sum()
    return weights


def median_estimate(
    values: Floats,
    batch: Ints,
    mix: dict[int, float],
    block: Ints,
    repeat_of_block: Ints,
    seed: int = SEED,
) -> Estimate:
    """Median of `values` in the mix of batch sizes, with a block bootstrap.

    `values`, `batch` and `block` are (steps,). The draws come from histograms, one per
    block and batch size, summed as drawn and weighted to the mix again. They have 400
    bins between the 10th and 90th percentile: no median falls outside, and the bins
    stay fine however long the tail.
    """
    weights = mix_weights(batch, mix)
    value = weighted_quantiles(values, weights, (0.5,))[0]
    low, high = weighted_quantiles(values, weights, (0.1, 0.9))
    edges = np.linspace(low, max(high, low + 1e-9), HISTOGRAM_BINS + 1)
    place = np.clip(np.searchsorted(edges, values, "right") - 1, 0, HISTOGRAM_BINS - 1)
    blocks = len(repeat_of_block)
    counts = resample_blocks(repeat_of_block, REPLICATES, np.random.default_rng(seed))
    # One product for all sizes: in many small ones BLAS's threads wait for each other.
    sizes = np.array(sorted(mix))
    own = np.isin(batch, sizes)
    histogram = np.searchsorted(sizes, batch[own]) * HISTOGRAM_BINS + place[own]
    flat = np.bincount(
        block[own] * (len(sizes) * HISTOGRAM_BINS) + histogram,
        minlength=blocks * len(sizes) * HISTOGRAM_BINS,
    ).reshape(blocks, -1)
    drawn = (counts @ flat.astype(float)).reshape(
        REPLICATES, len(sizes), HISTOGRAM_BINS
    )
    share = np.array([mix[size] for size in sizes]) / np.maximum(drawn.sum(axis=2), 1)
    heights = np.einsum("rsb,rs->rb", drawn, share)
    draws = weighted_medians((edges[:-1] + edges[1:]) / 2, heights)
    return Estimate(value, np.where(np.isfinite(draws), draws, value))
