// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
)

// The lines of a README that a report replaces are between these.
const (
	beginMarker = "<!-- kvbench:begin -->\n"
	endMarker   = "<!-- kvbench:end -->"
)

// busyCores of other work disturb whatever waits for a core.
const busyCores = 0.1

// report says in Markdown what was measured.
func report(file results) string {
	p := file.Provenance
	var b strings.Builder
	latencies, behind := file.latencies()
	fmt.Fprintf(&b, "kvindex at %.10s beside the concurrent radix tree of dynamo-kv-router %s: p50 / p99 of a lookup in µs, median over the rounds (%d),\n"+
		"and the ratio of the two in each round, median [lowest, highest]. Below 1, kvindex is faster; it is not in %d of %d rows at p50, in %d at p99.\n\n",
		p.Commit, p.Crate, p.Rounds, behind[0], len(latencies), behind[1])
	b.WriteString("| | kvindex | crate | ratio of p50 | ratio of p99 |\n|---|---:|---:|---:|---:|\n")
	b.WriteString(strings.Join(latencies, ""))
	b.WriteString("\n| | kvindex | crate | ratio |\n|---|---:|---:|---:|\n")
	for _, row := range rows() {
		if row.kind == "lookup" && !slices.Contains(row.args, "threads=2") {
			continue // the latency says as much
		}
		for _, of := range []struct {
			name, format string
			value        func(result) float64
		}{
			{"lookups per ms, ", "%.0f", func(r result) float64 { return r.LookupsPerS / 1e3 }},
			{"bytes per block, ", "%.0f", func(r result) float64 { return r.BytesPerBlock }},
		} {
			own, peer := file.values(row, sides[0], of.value), file.values(row, sides[1], of.value)
			if len(own) > 0 && own[0] > 0 {
				fmt.Fprintf(&b, "| %s%s | "+of.format+" | "+of.format+" | %s |\n",
					of.name, row.name, median(own), median(peer), ratios(own, peer))
			}
		}
	}
	var others []float64
	for _, t := range file.Trials {
		others = append(others, t.OtherCores)
	}
	fmt.Fprintf(&b, "\n%s, %s, %d cores, kernel %s, %s, %s. In all %d trials the answers of both sides were right. "+
		"Other work took %.2f cores during the median trial, %.2f at most.\n",
		p.Date[:10], p.CPU, p.Cores, p.Kernel, p.Go, p.Rust, len(file.Trials), median(others), slices.Max(others))
	if median(others) > busyCores {
		b.WriteString("**On a machine this busy bursts, loops and p99 do not count**: to be repeated on a quiet one.\n")
	}
	if p.Dirty {
		b.WriteString("The tree differed from that commit.\n")
	}
	return b.String()
}

// latencies returns the lines of the rows that have a latency, and in how many of them
// kvindex is slower at p50 and at p99.
func (f results) latencies() (lines []string, behind [2]int) {
	p50 := func(r result) float64 { return r.Latency.P50Us }
	p99 := func(r result) float64 { return r.Latency.P99Us }
	for _, row := range rows() {
		if row.kind == "memory" {
			continue
		}
		line := "| " + row.name
		for _, side := range sides {
			line += fmt.Sprintf(" | %.3g / %.3g", median(f.values(row, side, p50)), median(f.values(row, side, p99)))
		}
		for i, of := range []func(result) float64{p50, p99} {
			own, peer := f.values(row, sides[0], of), f.values(row, sides[1], of)
			line += " | " + ratios(own, peer)
			if median(quotients(own, peer)) > 1 {
				behind[i]++
			}
		}
		lines = append(lines, line+" |\n")
	}
	return lines, behind
}

// values returns what a side's results of a row say, round by round.
func (f results) values(of row, side string, value func(result) float64) []float64 {
	var values []float64
	for _, t := range f.Trials {
		if t.Row == of.name && t.Side == side {
			values = append(values, value(t.Result))
		}
	}
	return values
}

func ratios(own, peer []float64) string {
	q := quotients(own, peer)
	if len(q) == 1 {
		return fmt.Sprintf("%.2f", q[0])
	}
	return fmt.Sprintf("%.2f [%.2f, %.2f]", median(q), slices.Min(q), slices.Max(q))
}

func quotients(own, peer []float64) []float64 {
	q := make([]float64, len(own))
	for i := range q {
		q[i] = own[i] / peer[i]
	}
	return q
}

// median returns the middle one of the values, or of two the higher.
func median(values []float64) float64 {
	return slices.Sorted(slices.Values(values))[len(values)/2]
}
