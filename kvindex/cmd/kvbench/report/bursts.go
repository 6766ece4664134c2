// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"slices"
	"strings"

	"kvtax/kvindex/cmd/kvbench/results"
)

func (s shape) String() string { return fmt.Sprintf("%d readers × %d blocks", s.readers, s.blocks) }

// writeBursts writes a table for each shape.
func writeBursts(out *strings.Builder, file *results.File) {
	for _, s := range shapes(file, true) {
		t := newTable("index", "p50 µs", "p99 µs", "max µs", "lookup p50 µs", "released late p50 µs", "events/s", "late p50 / p99 µs", "coverage (min)", "allocs", "n")
		for _, name := range order {
			trials := bursts(file, name, s)
			if len(trials) == 0 {
				continue
			}
			of := func(figure func(*results.Burst) float64) sample { return values(trials, figure) }
			t.add(name, of(p50).withRange(), of(p99).withRange(),
				figure(slices.Max(of(func(b *results.Burst) float64 { return b.Latency.MaxUs }))),
				figure(of(func(b *results.Burst) float64 { return b.Service.P50Us }).median()),
				figure(of(func(b *results.Burst) float64 { return b.Release.P50Us }).median()),
				eventsCell(trials),
				fmt.Sprintf("%s / %s", figure(of(func(b *results.Burst) float64 { return b.Lateness.P50Us }).median()),
					figure(of(func(b *results.Burst) float64 { return b.Lateness.P99Us }).median())),
				fmt.Sprintf("%s (%s)", figure(of(func(b *results.Burst) float64 { return b.CoverageMean }).median()),
					figure(slices.Min(of(func(b *results.Burst) float64 { return b.CoverageMin })))),
				figure(of(func(b *results.Burst) float64 { return b.AllocsPerLookup }).median()),
				fmt.Sprint(samples(trials)))
		}
		t.write(out, s.String(), "")
	}
}

// eventsCell writes the events a second that came about, of those stated.
func eventsCell(trials map[int]*results.Burst) string {
	achieved := values(trials, func(b *results.Burst) float64 { return b.EventsPerSecond })
	stated := values(trials, func(b *results.Burst) float64 { return b.StatedEventsPerSecond })
	return fmt.Sprintf("%s of %s", figure(achieved.median()), figure(stated.median()))
}

func samples(trials map[int]*results.Burst) (n int64) {
	for _, b := range trials {
		n += b.Latency.N
	}
	return n
}

// shortBursts returns the medians alone, all shapes in one table.
func shortBursts(file *results.File) *table {
	all := shapes(file, true)
	columns := []string{"index"}
	for _, s := range all {
		columns = append(columns, fmt.Sprintf("%d × %d", s.readers, s.blocks))
	}
	t := newTable(columns...)
	for _, name := range order {
		row, any := []string{name}, false
		for _, s := range all {
			trials := bursts(file, name, s)
			any = any || len(trials) > 0
			row = append(row, fmt.Sprintf("%s / %s", figure(values(trials, p50).median()), figure(values(trials, p99).median())))
		}
		if any {
			t.add(row...)
		}
	}
	return t
}

// ratioTable compares ours to others, round by round.
func ratioTable(file *results.File) *table {
	t := newTable("burst", "against", "p50", "p99", "rounds")
	for _, s := range shapes(file, true) {
		ours := bursts(file, oursName, s)
		for _, other := range []string{upstreamName, mergedName} {
			theirs := bursts(file, other, s)
			if medians := ratios(theirs, ours, p50); len(medians) > 0 {
				t.add(s.String(), other, medians.withInterval(), ratios(theirs, ours, p99).withInterval(), fmt.Sprint(len(medians)))
			}
		}
	}
	return t
}

// scalingTable has those shapes that were measured on several numbers of cores.
func scalingTable(file *results.File) *table {
	t := newTable("burst", "GOMAXPROCS", "index", "p50 µs", "p99 µs", "events/s")
	for _, s := range shapes(file, false) {
		fewer := func(other shape) bool {
			return other.readers == s.readers && other.blocks == s.blocks && other.cores < file.Provenance.Cores
		}
		if !slices.ContainsFunc(shapes(file, false), fewer) {
			continue
		}
		for _, name := range []string{upstreamName, mergedName, oursName} {
			if trials := bursts(file, name, s); len(trials) > 0 {
				t.add(s.String(), fmt.Sprint(s.cores), name,
					values(trials, p50).withRange(), values(trials, p99).withRange(), eventsCell(trials))
			}
		}
	}
	return t
}
