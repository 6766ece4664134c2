// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"slices"
	"strings"

	"kvtax/kvindex/cmd/kvbench/results"
)

// What makes a run suspect its own numbers.
const (
	minEventsPart = 0.95 // of the stated events a second
	maxOtherPart  = 0.05 // of the cores, busy with anything else
)

// notes are what a reader has to know before believing the figures.
func notes(file *results.File) []string {
	var all []string
	note := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	p := file.Provenance
	if p.Quick {
		note("This was a -quick run: it shows that everything works, and no figure means anything.")
	}
	if len(file.Trials) < file.Planned {
		note("The run was interrupted after %d of %d trials.", len(file.Trials), file.Planned)
	}
	if p.Rounds < minRounds {
		note("There are fewer than %d rounds: what depends on time is undecided.", minRounds)
	}
	if p.Dirty {
		note("The tree had changes that are not in the commit.")
	}
	if disturbed, busiest := otherWork(file); disturbed > 0 {
		note("Other work took more than %v %% of the cores during %d of %d trials, at most %s of %d cores.",
			100*maxOtherPart, disturbed, len(file.Trials), figure(busiest), p.Cores)
	}
	addTrialNotes(file, note)
	return all
}

// otherWork returns during how many trials other work was high, and the most cores that
// it took.
func otherWork(file *results.File) (disturbed int, busiest float64) {
	for _, t := range file.Trials {
		busiest = max(busiest, t.OtherCores)
		if t.OtherCores > maxOtherPart*float64(file.Provenance.Cores) {
			disturbed++
		}
	}
	return disturbed, busiest
}

func addTrialNotes(file *results.File, note func(format string, args ...any)) {
	for _, suspicion := range []struct {
		text  string
		holds func(results.Trial) bool
	}{
		{"No result, the trial failed", func(t results.Trial) bool { return t.Failure != "" }},
		{"Stopped before all lookups had ended, so the latencies are lower bounds", func(t results.Trial) bool {
			return t.Burst != nil && t.Burst.Stopped
		}},
		{"Writers came to less than 95 % of the stated events a second, so readers had it easier than meant", func(t results.Trial) bool {
			return t.Burst != nil && t.Burst.EventsPerSecond < minEventsPart*t.Burst.StatedEventsPerSecond
		}},
		{"Some of the hot prefixes were not found whole, and looking at less takes less time", func(t results.Trial) bool {
			return t.Burst != nil && t.Burst.CoverageMin < 1
		}},
		{"Evicted keys that the index did not hold any more", func(t results.Trial) bool {
			return t.Writes != nil && min(t.Writes.Evicted, t.Writes.EvictedByAll) < 0.99
		}},
		{"A chain was not found whole in the walk", func(t results.Trial) bool {
			return t.Walk != nil && t.Walk.Prefix < t.Walk.Blocks
		}},
		{"The index held fewer keys than it was filled with", func(t results.Trial) bool {
			return t.Memory != nil && t.Memory.Len < t.Memory.Keys
		}},
	} {
		if found := trialsWhere(file, suspicion.holds); len(found) > 0 {
			note("%s: %s.", suspicion.text, strings.Join(found, ", "))
		}
	}
}

// trialsWhere names the trials that something holds for, the same ones of all rounds
// together.
func trialsWhere(file *results.File, holds func(results.Trial) bool) []string {
	var names []string
	counts := map[string]int{}
	for _, t := range file.Trials {
		if !holds(t) {
			continue
		}
		name := strings.TrimSpace(t.Kind + " " + t.Design)
		if t.Burst != nil {
			name = fmt.Sprintf("%s %d×%d on %d cores", name, t.Burst.Readers, t.Burst.Blocks, t.GOMAXPROCS)
		}
		if counts[name]++; counts[name] == 1 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for i, name := range names {
		if n := counts[name]; n > 1 {
			names[i] = fmt.Sprintf("%s (%d trials)", name, n)
		}
	}
	return names
}
