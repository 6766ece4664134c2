// SPDX-License-Identifier: Apache-2.0

// Package report says in Markdown what a run measured.
package report

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"kvtax/kvindex/cmd/kvbench/results"
)

// Whole returns all that there is to say of a run.
func Whole(file *results.File) string {
	out := new(strings.Builder)
	out.WriteString("# What kvbench measured\n\n")
	writeProvenance(out, file)
	writeNotes(out, file)
	out.WriteString("## Aims\n\n")
	aims := aimsTable(file)
	aims.write(out, "", verdicts(aims)+fmt.Sprintf(
		". The figure is the median over rounds, with the %s; a figure that depends on time is undecided while that has the aim within it, or with fewer than %d rounds.",
		intervalName(file), minRounds))
	out.WriteString("## Bursts of lookups while 40 pods write\n\n" + burstText + "\n\n")
	writeBursts(out, file)
	ratioTable(file).write(out, "How many times as fast kvindex is",
		"Ratios of the same round; median and "+intervalName(file)+".")
	scalingTable(file).write(out, "Fewer cores", "")
	out.WriteString("## Without load, capacity and memory\n\n")
	walkTable(file).write(out, "One thread, nothing else", walkText)
	memoryTable(file).write(out, "Memory", "Growth of the heap. Sets: one for all keys, 64, or another for each key.")
	writesTable(file).write(out, "Writes", "Keys a second, in events of 16, at the ceiling.")
	writeReplays(out, file)
	return out.String()
}

const burstText = `Latency counts from the moment a burst was meant to be released, writers keep to a
schedule of their own, and neither waits for the index: what is late is counted as late.
"Lookup" is the time from the beginning of a lookup to its end. Median over rounds (range).
Upstream's lookup does not score the pods, all others do. Readers are released as late
as the machine lets the benchmark wake up, and events are sent as late as it says.`

const walkText = `A chain of 263 blocks; cold is all chains in random order. The floor is 263
independent 16-byte loads from as much memory as an open-addressed table of all keys
takes. Upstream is left out: it would need 10 GB.`

// Short returns the figures for a README, and the commands that make them.
func Short(file *results.File) string {
	out := new(strings.Builder)
	p := file.Provenance
	shortBursts(file).write(out, "", fmt.Sprintf(
		"Latency of a lookup in a burst, p50 / p99 in µs by readers × blocks, while 40 pods write; median of %d rounds on %s, %d cores:",
		p.Rounds, p.CPU, p.Cores))
	fmt.Fprintf(out, "%s.", verdicts(aimsTable(file)))
	if n := len(notes(file)); n > 0 {
		fmt.Fprintf(out, " The run suspects its own numbers for reasons the report names (%d).", n)
	}
	out.WriteString(" Made by\n\n```\n" + commands(file) + "```\n")
	return out.String()
}

// commands are those that make the results, and the report of them.
func commands(file *results.File) string {
	p := file.Provenance
	more := ""
	if p.Quick {
		more = " -quick"
	}
	return fmt.Sprintf("bin/kvbench run -traces ../traces -out results.json -rounds %d -seed %d%s\n", p.Rounds, p.Seed, more) +
		"bin/kvbench report -in results.json -readme README.md\n"
}

// intervalName says what intervals are, which depends on the number of rounds.
func intervalName(file *results.File) string {
	if file.Provenance.Rounds < minBootstrap {
		return "range over rounds"
	}
	return "95 % bootstrap interval"
}

func writeProvenance(out *strings.Builder, file *results.File) {
	p := file.Provenance
	fmt.Fprintf(out, "%s; %s, %d cores, %s, kernel %s; %s; commit %s; %d rounds, seed %d.\n",
		p.Date, p.CPU, p.Cores, p.OS, p.Kernel, p.Go, cmp.Or(p.Commit, "unknown"), p.Rounds, p.Seed)
	for _, path := range slices.Sorted(maps.Keys(p.Modules)) {
		fmt.Fprintf(out, "%s %s.\n", path, p.Modules[path])
	}
	fmt.Fprintf(out, "\n```\n%s```\n\n", commands(file))
}

func writeNotes(out *strings.Builder, file *results.File) {
	all := notes(file)
	if len(all) == 0 {
		return
	}
	out.WriteString("## What makes these numbers suspect\n\n")
	for _, note := range all {
		fmt.Fprintf(out, "- %s\n", note)
	}
	for _, t := range file.Trials {
		if t.Failure != "" {
			fmt.Fprintf(out, "- %s %s %s, round %d:\n\n```\n%s\n```\n\n", t.Kind, t.Design, strings.Join(t.Args, " "), t.Round, t.Failure)
		}
	}
	out.WriteByte('\n')
}

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

const (
	beginMarker = "<!-- kvbench:begin -->\n"
	endMarker   = "<!-- kvbench:end -->"
)

// Replace returns a README with another text between the markers.
func Replace(readme, text string) (string, error) {
	before, rest, hasBegin := strings.Cut(readme, beginMarker)
	_, after, hasEnd := strings.Cut(rest, endMarker)
	if !hasBegin || !hasEnd {
		return "", errors.New("no lines <!-- kvbench:begin --> and <!-- kvbench:end --> in it: put them where the figures belong")
	}
	return before + beginMarker + text + endMarker + after, nil
}
