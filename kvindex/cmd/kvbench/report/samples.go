// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"kvtax/kvindex/cmd/kvbench/results"
)

// order is that of designs in tables.
var order = []string{"upstream", "exact-lru", "merged", "kvindex"}

const (
	oursName     = "kvindex"
	upstreamName = "upstream"
	mergedName   = "merged"
	exactName    = "exact-lru"
)

// A shape is the size of a burst, and the cores it had.
type shape struct{ readers, blocks, cores int }

// shapes returns those that were measured on all cores, or on any number of them, in
// the order of the file's first round.
func shapes(file *results.File, allCores bool) []shape {
	var found []shape
	for _, t := range file.Trials {
		if t.Burst == nil || allCores && t.GOMAXPROCS != file.Provenance.Cores {
			continue
		}
		s := shape{t.Burst.Readers, t.Burst.Blocks, t.GOMAXPROCS}
		if !slices.Contains(found, s) {
			found = append(found, s)
		}
	}
	slices.SortFunc(found, func(a, b shape) int {
		if a.blocks != b.blocks {
			return a.blocks - b.blocks
		}
		if a.readers != b.readers {
			return a.readers - b.readers
		}
		return a.cores - b.cores
	})
	return found
}

// bursts returns the trials of a design and a shape, by round.
func bursts(file *results.File, design string, s shape) map[int]*results.Burst {
	found := map[int]*results.Burst{}
	for _, t := range file.Trials {
		if t.Design == design && t.Burst != nil && s == (shape{t.Burst.Readers, t.Burst.Blocks, t.GOMAXPROCS}) {
			found[t.Round] = t.Burst
		}
	}
	return found
}

// values returns a figure of each trial, by round.
func values[T any](trials map[int]*T, figure func(*T) float64) sample {
	var all sample
	for _, round := range sortedRounds(trials) {
		all = append(all, figure(trials[round]))
	}
	return all
}

// ratios returns a figure of one design over that of another, for each round that has
// both: what disturbed a round disturbed both.
func ratios[T any](above, below map[int]*T, figure func(*T) float64) sample {
	var all sample
	for _, round := range sortedRounds(above) {
		if other, ok := below[round]; ok {
			all = append(all, figure(above[round])/figure(other))
		}
	}
	return all
}

func sortedRounds[T any](trials map[int]*T) []int {
	var rounds []int
	for round := range trials {
		rounds = append(rounds, round)
	}
	slices.Sort(rounds)
	return rounds
}

func p50(b *results.Burst) float64 { return b.Latency.P50Us }
func p99(b *results.Burst) float64 { return b.Latency.P99Us }

// walks returns the walks of a design, by round.
func walks(file *results.File, design string) map[int]*results.Walk {
	found := map[int]*results.Walk{}
	for _, t := range file.Trials {
		if t.Design == design && t.Walk != nil {
			found[t.Round] = t.Walk
		}
	}
	return found
}

// usable returns the usable part of a trace at each capacity.
func usable(file *results.File, design, trace string) map[int]float64 {
	found := map[int]float64{}
	for _, t := range file.Trials {
		if t.Design == design && t.Replay != nil && t.Replay.Trace == trace {
			found[t.Replay.Capacity] = t.Replay.UsableRatio
		}
	}
	return found
}

// traces returns the traces that were replayed, each with its capacities, ascending.
func traces(file *results.File) (names []string, capacities map[string][]int) {
	capacities = map[string][]int{}
	for _, t := range file.Trials {
		if t.Replay == nil {
			continue
		}
		name, capacity := t.Replay.Trace, t.Replay.Capacity
		if capacities[name] == nil {
			names = append(names, name)
		}
		if !slices.Contains(capacities[name], capacity) {
			capacities[name] = append(capacities[name], capacity)
		}
	}
	for _, all := range capacities {
		slices.Sort(all)
	}
	slices.Sort(names)
	return names, capacities
}

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
