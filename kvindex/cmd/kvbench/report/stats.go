// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// A sample is what the rounds of a run gave for one figure.
type sample []float64

// median returns the middle value, or the mean of the two in the middle.
func (s sample) median() float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// With minBootstrap rounds or more, an interval is the 95 % bootstrap interval of the
// median; with fewer it is the range.
const minBootstrap = 5

// interval returns the bounds of what the median may be.
func (s sample) interval() (low, high float64) {
	if len(s) < minBootstrap {
		return slices.Min(s), slices.Max(s)
	}
	const resamples = 2_000
	random := rand.New(rand.NewPCG(1, 0)) // equal results give equal reports
	medians := make([]float64, resamples)
	drawn := make(sample, len(s))
	for i := range medians {
		for j := range drawn {
			drawn[j] = s[random.IntN(len(s))]
		}
		medians[i] = drawn.median()
	}
	slices.Sort(medians)
	return medians[resamples*25/1000], medians[resamples*975/1000-1]
}

// figure writes a number with three significant digits, and thousands apart.
func figure(value float64) string {
	if math.IsNaN(value) {
		return "–"
	}
	magnitude := 0
	if value != 0 {
		magnitude = int(math.Floor(math.Log10(math.Abs(value))))
	}
	decimals := max(0, 2-magnitude)
	text := strconv.FormatFloat(value, 'f', decimals, 64)
	if strings.Contains(text, ".") {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	for i := len(text) - 3; i > 0 && magnitude >= 3; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// withRange writes the median and the range over rounds.
func (s sample) withRange() string {
	if len(s) == 0 {
		return "–"
	}
	if len(s) == 1 {
		return figure(s[0])
	}
	return fmt.Sprintf("%s (%s–%s)", figure(s.median()), figure(slices.Min(s)), figure(slices.Max(s)))
}

// withInterval writes the median and its interval, as a ratio.
func (s sample) withInterval() string {
	if len(s) == 0 {
		return "–"
	}
	low, high := s.interval()
	return fmt.Sprintf("%s× (%s–%s)", figure(s.median()), figure(low), figure(high))
}
