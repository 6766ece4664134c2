// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"kvtax/kvindex/cmd/kvbench/results"
)

// newHistogram holds nanoseconds up to an hour, with three digits.
func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, int64(time.Hour), 3)
}

// record notes a duration. One that is beyond the histogram counts as its limit; before
// its time is no time.
func record(h *hdrhistogram.Histogram, d time.Duration) {
	// The value is within the bounds, the only error there is.
	_ = h.RecordValue(min(max(int64(d), 0), h.HighestTrackableValue()))
}

// quantiles sums up a histogram of nanoseconds.
func quantiles(h *hdrhistogram.Histogram) results.Quantiles {
	us := func(q float64) float64 { return float64(h.ValueAtQuantile(q)) / 1e3 }
	return results.Quantiles{
		N:     h.TotalCount(),
		P50Us: us(50),
		P90Us: us(90),
		P99Us: us(99),
		MaxUs: us(100),
	}
}
