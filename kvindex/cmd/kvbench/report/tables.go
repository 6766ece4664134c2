// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
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

// walkTable has nanoseconds as microseconds.
func walkTable(file *results.File) *table {
	t := newTable("index", "keys", "hot µs", "cold, first read µs", "cold, read before µs", "floor µs", "first / floor", "read before / floor")
	for _, name := range order {
		trials := walks(file, name)
		if len(trials) == 0 {
			continue
		}
		us := func(ns func(*results.Walk) float64) string {
			return figure(values(trials, ns).median() / 1e3)
		}
		keys := values(trials, func(w *results.Walk) float64 { return float64(w.Keys) })
		t.add(name, figure(keys.median()),
			us(func(w *results.Walk) float64 { return w.HotNs }),
			us(func(w *results.Walk) float64 { return w.ColdFirstNs }),
			us(func(w *results.Walk) float64 { return w.ColdStampedNs }),
			us(func(w *results.Walk) float64 { return w.FloorNs }),
			values(trials, firstToFloor).withInterval(),
			values(trials, stampedToFloor).withInterval())
	}
	return t
}

func firstToFloor(w *results.Walk) float64   { return w.FirstToFloor }
func stampedToFloor(w *results.Walk) float64 { return w.StampedToFloor }

// memoryTable has a row for each filling.
func memoryTable(file *results.File) *table {
	t := newTable("pods a key", "pod sets", "index", "keys", "bytes a key")
	var trials []results.Trial
	for _, trial := range file.Trials {
		if trial.Memory != nil {
			trials = append(trials, trial)
		}
	}
	slices.SortStableFunc(trials, func(a, b results.Trial) int {
		return cmp.Or(cmp.Compare(a.Memory.PodsPerKey, b.Memory.PodsPerKey),
			-cmp.Compare(a.Memory.Sets, b.Memory.Sets), // identical, few, different: the alphabet the other way round
			cmp.Compare(slices.Index(order, a.Design), slices.Index(order, b.Design)))
	})
	for _, trial := range trials {
		m := trial.Memory
		t.add(fmt.Sprint(m.PodsPerKey), m.Sets, trial.Design, figure(float64(m.Keys)), figure(m.BytesPerKey))
	}
	return t
}

// writesTable has keys a second.
func writesTable(file *results.File) *table {
	t := newTable("index", "add, 1 goroutine", "add, one a core", "evict, 1 goroutine", "evict, one a core", "of which held")
	for _, name := range order {
		trials := map[int]*results.Writes{}
		for _, trial := range file.Trials {
			if trial.Design == name && trial.Writes != nil {
				trials[trial.Round] = trial.Writes
			}
		}
		if len(trials) == 0 {
			continue
		}
		of := func(f func(*results.Writes) float64) string { return figure(values(trials, f).median()) }
		t.add(name,
			of(func(w *results.Writes) float64 { return w.AddKeysPerSecond }),
			of(func(w *results.Writes) float64 { return w.AddAllKeysPerSecond }),
			of(func(w *results.Writes) float64 { return w.EvictKeysPerSecond }),
			of(func(w *results.Writes) float64 { return w.EvictAllKeysPerSecond }),
			of(func(w *results.Writes) float64 { return min(w.Evicted, w.EvictedByAll) }))
	}
	return t
}

// writeReplays writes a table for each trace.
func writeReplays(out *strings.Builder, file *results.File) {
	names, capacities := traces(file)
	for _, trace := range names {
		columns := []string{"index"}
		for _, capacity := range capacities[trace] {
			columns = append(columns, figure(float64(capacity))+" keys")
		}
		t := newTable(columns...)
		for _, name := range order {
			found := usable(file, name, trace)
			if len(found) == 0 {
				continue
			}
			row := []string{name}
			for _, capacity := range capacities[trace] {
				ratio, ok := found[capacity]
				if !ok {
					row = append(row, "–")
					continue
				}
				row = append(row, fmt.Sprintf("%.4f", ratio))
			}
			t.add(row...)
		}
		t.write(out, "Usable prefix: "+trace, "")
	}
}

// A table is one in Markdown.
type table struct {
	columns []string
	rows    [][]string
}

func newTable(columns ...string) *table { return &table{columns: columns} }

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// write writes the table under a heading and a text, or nothing if it is empty.
func (t *table) write(out *strings.Builder, heading, text string) {
	if len(t.rows) == 0 {
		return
	}
	if heading != "" {
		fmt.Fprintf(out, "### %s\n\n", heading)
	}
	if text != "" {
		fmt.Fprintf(out, "%s\n\n", text)
	}
	line := func(cells []string) { fmt.Fprintf(out, "| %s |\n", strings.Join(cells, " | ")) }
	line(t.columns)
	fmt.Fprintf(out, "|%s\n", strings.Repeat("---|", len(t.columns)))
	for _, row := range t.rows {
		line(row)
	}
	out.WriteByte('\n')
}
