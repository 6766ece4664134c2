// SPDX-License-Identifier: Apache-2.0

// Package trial measures one index in one process.
package trial

import (
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"kvtax/kvindex/cmd/kvbench/results"
)

// eventKeys is the number of keys in an event: a pod reports a few blocks at a time.
const eventKeys = 16

// podsPerChain is the number of pods that hold a hot chain.
const podsPerChain = 10

// mix spreads numbers over 64 bits as block hashes are, one to one (the finalizer of
// splitmix64).
func mix(n uint64) uint64 {
	n += 0x9E3779B97F4A7C15
	n = (n ^ n>>30) * 0xBF58476D1CE4E5B9
	n = (n ^ n>>27) * 0x94D049BB133111EB
	return n ^ n>>31
}

// fillKeys puts the keys numbered from first on into keys.
func fillKeys(keys []uint64, first uint64) {
	for i := range keys {
		keys[i] = mix(first + uint64(i))
	}
}

// newKeys returns the n keys numbered from first on.
func newKeys(first uint64, n int) []uint64 {
	keys := make([]uint64, n)
	fillKeys(keys, first)
	return keys
}

// podNames returns the names of n pods.
func podNames(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("10.0.%d.%d:8000", i/250, i%250+1)
	}
	return names
}

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
