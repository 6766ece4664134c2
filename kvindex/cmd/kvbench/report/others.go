// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"kvtax/kvindex/cmd/kvbench/results"
)

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
