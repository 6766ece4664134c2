// SPDX-License-Identifier: Apache-2.0

// Package report says in Markdown what a run measured.
package report

import (
	"cmp"
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
	return "bash cmd/kvbench/build_variants.sh bin\n" +
		fmt.Sprintf("bin/kvbench run -bin bin -traces ../traces -out results.json -rounds %d -seed %d%s\n", p.Rounds, p.Seed, more) +
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
