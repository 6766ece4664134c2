// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"slices"

	"kvtax/kvindex/cmd/kvbench/results"
)

// What kvindex is meant to reach.
const (
	aimUpstream    = 50.0  // times as fast as upstream, at least
	aimMerged      = 5.0   // times as fast as the merged shape, at least
	aimFloor       = 4.0   // times the memory floor, at most
	aimBytesPerKey = 64.0  // of identical sets, at most
	aimUsable      = 0.005 // of the usable prefix below exact LRU, at most
)

// minRounds is how many rounds it takes to judge a figure that depends on time.
const minRounds = 3

const (
	met       = "met"
	missed    = "missed"
	undecided = "undecided"
)

// aimsTable says of each aim whether it is met.
func aimsTable(file *results.File) *table {
	t := newTable("aim", "of", "figure", "")
	addRatioAims(t, file)
	walks := walks(file, oursName)
	for _, w := range []struct {
		name   string
		figure func(*results.Walk) float64
	}{{"first read", firstToFloor}, {"read before", stampedToFloor}} {
		ratio := values(walks, w.figure)
		t.add(fmt.Sprintf("a cold walk within %v× of the memory floor", aimFloor), w.name, ratio.withInterval(), atMost(ratio, aimFloor))
	}
	addMemoryAim(t, file)
	allocs := allocations(file)
	t.add("no allocation on the scored path", "every burst", figure(allocs), within(allocs, 0))
	addUsableAims(t, file)
	return t
}

func addRatioAims(t *table, file *results.File) {
	for _, aim := range []struct {
		other string
		times float64
	}{{upstreamName, aimUpstream}, {mergedName, aimMerged}} {
		for _, s := range shapes(file, true) {
			for _, of := range []struct {
				name   string
				figure func(*results.Burst) float64
			}{{"p50", p50}, {"p99", p99}} {
				ratio := ratios(bursts(file, aim.other, s), bursts(file, oursName, s), of.figure)
				t.add(fmt.Sprintf("%v× as fast as %s", aim.times, aim.other), fmt.Sprintf("%s, %v", of.name, s),
					ratio.withInterval(), atLeast(ratio, aim.times))
			}
		}
	}
}

func addMemoryAim(t *table, file *results.File) {
	worst := math.NaN()
	for _, trial := range file.Trials {
		if m := trial.Memory; m != nil && trial.Design == oursName && m.Sets == "identical" && !(m.BytesPerKey < worst) {
			worst = m.BytesPerKey
		}
	}
	t.add(fmt.Sprintf("at most %v bytes a key", aimBytesPerKey), "identical sets, any number of pods", figure(worst), within(worst, aimBytesPerKey))
}

// allocations returns the most that a lookup of ours allocated, or no number if there
// was none.
func allocations(file *results.File) float64 {
	worst := math.NaN()
	for _, trial := range file.Trials {
		if b := trial.Burst; b != nil && trial.Design == oursName && !(b.AllocsPerLookup < worst) {
			worst = b.AllocsPerLookup
		}
	}
	return worst
}

func addUsableAims(t *table, file *results.File) {
	names, capacities := traces(file)
	for _, trace := range names {
		ours, exact := usable(file, oursName, trace), usable(file, exactName, trace)
		worst := math.NaN()
		for _, capacity := range capacities[trace] {
			of, isOurs := ours[capacity]
			lru, isExact := exact[capacity]
			if below := lru - of; isOurs && isExact && !(below < worst) {
				worst = below
			}
		}
		t.add(fmt.Sprintf("usable prefix at most %v below exact LRU", aimUsable), trace+", at the worst capacity",
			fmt.Sprintf("%+.4f", 0-worst), within(worst, aimUsable))
	}
}

// atLeast judges by the interval of the median.
func atLeast(s sample, aim float64) string {
	if len(s) < minRounds {
		return undecided
	}
	low, high := s.interval()
	return verdict(low >= aim, high < aim)
}

func atMost(s sample, aim float64) string {
	if len(s) < minRounds {
		return undecided
	}
	low, high := s.interval()
	return verdict(high <= aim, low > aim)
}

// within judges what does not depend on time.
func within(value, aim float64) string {
	return verdict(value <= aim, value > aim)
}

func verdict(isMet, isMissed bool) string {
	switch {
	case isMet:
		return met
	case isMissed:
		return missed
	}
	return undecided
}

// verdicts counts those of a table of aims, the last cells.
func verdicts(t *table) string {
	count := func(verdict string) int {
		n := 0
		for _, row := range t.rows {
			if slices.Contains(row[len(row)-1:], verdict) {
				n++
			}
		}
		return n
	}
	return fmt.Sprintf("Of %d aims %d are met, %d missed, %d undecided", len(t.rows), count(met), count(missed), count(undecided))
}
