// SPDX-License-Identifier: Apache-2.0

// Kvbench compares kvindex with the concurrent radix tree of the crate dynamo-kv-router, in
// turn and by the same load.
//
//	kvbench run -peer PROGRAM -out FILE    measures both sides
//	kvbench report -in FILE -readme FILE   writes the tables into a README
//	kvbench locks -out FILE -readme FILE   measures reads by Get, by Peek and by kvindex
//	kvbench trial KIND name=value ...      measures one thing of kvindex, for run
package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

const usage = "usage: kvbench run|report|locks|trial ..."

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := command(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "kvbench:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		return errors.New(usage)
	}
	switch args[0] {
	case "run":
		return runCommand(ctx, args[1:], stderr)
	case "report":
		return reportCommand(args[1:], stderr)
	case "locks":
		return locksCommand(ctx, args[1:], stderr)
	case "trial":
		return trialCommand(args[1:], stdout)
	}
	return fmt.Errorf("no command is named %q\n%s", args[0], usage)
}

func runCommand(ctx context.Context, args []string, stderr io.Writer) error {
	flags := flag.NewFlagSet("kvbench run", flag.ContinueOnError)
	flags.SetOutput(stderr)
	peer := flags.String("peer", "", "program built from peer/")
	out := flags.String("out", "results.json", "file for the results")
	rounds := flags.Int("rounds", 5, "how often each trial is run")
	quick := flags.Bool("quick", false, "one short round, to see that everything works")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *peer == "" {
		return errors.New("run: -peer is needed")
	}
	own, err := os.Executable()
	if err != nil {
		return err
	}
	run := &run{programs: [2]string{own, *peer}, rounds: *rounds, more: fullArguments, progress: stderr}
	if *quick {
		run.rounds, run.more = 1, quickArguments
	}
	return run.all(ctx, func(file results) error {
		data, err := json.MarshalIndent(file, "", " ")
		if err != nil {
			return err
		}
		return os.WriteFile(*out, append(data, '\n'), 0o666)
	})
}

func reportCommand(args []string, stderr io.Writer) error {
	flags := flag.NewFlagSet("kvbench report", flag.ContinueOnError)
	flags.SetOutput(stderr)
	in := flags.String("in", "results.json", "results of a run")
	readme := flags.String("readme", "README.md", "file whose lines between the markers are replaced")
	if err := flags.Parse(args); err != nil {
		return err
	}
	data, err := os.ReadFile(*in)
	if err != nil {
		return err
	}
	var file results
	if err := json.Unmarshal(data, &file); err != nil {
		return fmt.Errorf("%s: %w", *in, err)
	}
	return replaceBetween(*readme, beginMarker, endMarker, report(file))
}

// replaceBetween replaces the lines of a file between two markers.
func replaceBetween(name, begin, end, lines string) error {
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	before, rest, begun := strings.Cut(string(text), begin)
	_, after, ended := strings.Cut(rest, end)
	if !begun || !ended {
		return fmt.Errorf("%s has no lines %s and %s", name, begin, end)
	}
	return os.WriteFile(name, []byte(before+begin+lines+end+after), 0o666)
}

func trialCommand(args []string, stdout io.Writer) error {
	if len(args) == 0 || trials[args[0]] == nil {
		return fmt.Errorf("trial: no such kind: %q", args)
	}
	a, err := parseArguments(args[1:])
	if err != nil {
		return err
	}
	r, err := trials[args[0]](a)
	if err != nil {
		return err
	}
	return json.NewEncoder(stdout).Encode(r)
}

// results are those of a run, as they are kept.
type results struct {
	Provenance provenance `json:"provenance"`
	Trials     []trial    `json:"trials"`
}

// provenance is what a run was measured on, and with.
type provenance struct {
	Date   string `json:"date"`
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	Kernel string `json:"kernel"`
	Go     string `json:"go"`
	Rust   string `json:"rust"`
	// Commit is the tree's; Dirty tells that tracked files differ from it.
	Commit string `json:"commit"`
	Dirty  bool   `json:"dirty"`
	Crate  string `json:"crate"` // the version of dynamo-kv-router
	Rounds int    `json:"rounds"`
}

// The sides of a comparison, in the order of their programs.
var sides = [2]string{"kvindex", "dynamo-kv-router"}

// A trial is one measurement of one side.
type trial struct {
	Row   string   `json:"row"`
	Kind  string   `json:"kind"`
	Args  []string `json:"args"`
	Round int      `json:"round"`
	Side  string   `json:"side"`
	// OtherCores are the cores that others had meanwhile, on average.
	OtherCores float64 `json:"other_cores"`
	Result     result  `json:"result"`
}

// A row is one line of the tables.
type row struct {
	name string
	kind string
	args []string
}

func newRow(kind, args, name string) row { return row{name, kind, strings.Fields(args)} }

// rows are all lines of the tables, of trials with these further arguments.
func rows(more []string) []row {
	blocksHeld := "1 M"
	if a, err := parseArguments(more); err == nil && a.get("keys", 1_000_000) != 1_000_000 {
		blocksHeld = fmt.Sprint(a["keys"])
	}
	var all []row
	for _, blocks := range []string{"263", "1024"} {
		for _, pods := range []string{"1", "10", "40"} {
			all = append(all, newRow("lookup", "blocks="+blocks+" holders="+pods,
				"one reader, "+blocks+" blocks on "+pods+" of 40 pods"))
		}
	}
	all = append(all,
		newRow("lookup", "blocks=263 holders=40 depths=1", "one reader, 263 blocks, each of 40 pods to another depth"),
		newRow("lookup", "blocks=263 holders=10 fork=16", "one reader, 263 blocks, others part at each 16th"),
		newRow("lookup", "blocks=1024 holders=40 fork=16", "one reader, 1024 blocks on 40 pods, others part at each 16th"),
		newRow("cold", "blocks=263 holders=10", "one reader, 263 blocks of "+blocksHeld+", in random order"),
		newRow("lookup", "blocks=263 holders=10 threads=2", "two readers, 263 blocks"),
	)
	for _, shape := range []string{"64 263 1", "64 263 10", "64 263 40", "128 263 10", "64 1024 1", "64 1024 10", "64 1024 40", "128 1024 10"} {
		var readers, blocks, pods string
		fmt.Sscan(shape, &readers, &blocks, &pods)
		all = append(all, newRow("burst", "readers="+readers+" blocks="+blocks+" holders="+pods,
			"burst of "+readers+" readers, "+blocks+" blocks on "+pods+" pods"))
	}
	for _, blocks := range []string{"263", "1024"} {
		all = append(all, newRow("loop", "readers=64 holders=10 blocks="+blocks, "64 readers in a loop beside the writers, "+blocks+" blocks"))
	}
	for _, pods := range []string{"1", "10", "40"} {
		all = append(all, newRow("memory", "holders="+pods, blocksHeld+" blocks on "+pods+" pods"))
	}
	return all
}

// fullArguments are those of every trial, quickArguments make it short.
var (
	fullArguments  = []string{"batches=1000"}
	quickArguments = []string{"filler=2560", "batches=10", "singles=200", "bursts=2", "period_ms=50", "ms=50", "keys=100000"}
)

// A run measures both sides in turn.
type run struct {
	programs [2]string
	rounds   int
	more     []string // arguments of every trial
	progress io.Writer
}

// all runs every trial, a process for each, and in each round the sides in another order.
// What there is after each round is saved. It is an error if an answer is wrong, or the
// sides' answers differ.
func (r *run) all(ctx context.Context, save func(results) error) error {
	file := results{Provenance: newProvenance(ctx)}
	for round := range r.rounds {
		for n, row := range rows(r.more) {
			if row.kind == "memory" && round > 0 {
				continue // it does not depend on time
			}
			var pair [2]result
			for i := range sides {
				side := (i + round + n) % len(sides)
				t, err := r.one(ctx, row, round+1, side)
				if err != nil {
					return fmt.Errorf("%s: %s: %w", sides[side], row.name, err)
				}
				pair[side] = t.Result
				file.Trials = append(file.Trials, t)
			}
			if !slices.Equal(pair[0].Answers, pair[1].Answers) {
				return fmt.Errorf("%s: the answers differ: %q", row.name, [][]string{pair[0].Answers, pair[1].Answers})
			}
			fmt.Fprintf(r.progress, "round %d of %d: %s\n", round+1, r.rounds, row.name)
		}
		file.Provenance.Rounds = round + 1
		if err := save(file); err != nil {
			return err
		}
	}
	return nil
}

// trialLimit ends a trial that hangs. On two cores for itself it takes seconds.
const trialLimit = 10 * time.Minute

// one runs one trial.
func (r *run) one(ctx context.Context, of row, round, side int) (trial, error) {
	t := trial{Row: of.name, Kind: of.kind, Args: slices.Concat(of.args, r.more), Round: round, Side: sides[side]}
	args := append([]string{of.kind}, t.Args...)
	if side == 0 {
		args = append([]string{"trial"}, args...)
	}
	limited, cancel := context.WithTimeout(ctx, trialLimit)
	defer cancel()
	child := exec.CommandContext(limited, r.programs[side], args...)
	child.Stderr = os.Stderr
	begin, busy := time.Now(), busySeconds()
	out, err := child.Output()
	if err != nil {
		return t, err
	}
	own := child.ProcessState.UserTime() + child.ProcessState.SystemTime()
	t.OtherCores = max(0, (busySeconds()-busy-own.Seconds())/time.Since(begin).Seconds())
	if err := json.Unmarshal(out, &t.Result); err != nil {
		return t, err
	}
	if t.Result.Wrong > 0 {
		return t, fmt.Errorf("%d answers are wrong", t.Result.Wrong)
	}
	return t, nil
}

//go:embed peer/Cargo.lock
var peerLock string

var crateVersion = regexp.MustCompile(`name = "dynamo-kv-router"\nversion = "(.*)"`)

func newProvenance(ctx context.Context) provenance {
	output := func(name string, args ...string) string {
		out, err := exec.CommandContext(ctx, name, args...).Output()
		if err != nil {
			return "unknown"
		}
		return string(bytes.TrimSpace(out))
	}
	cpu := "unknown"
	info, _ := os.ReadFile("/proc/cpuinfo")
	if model := regexp.MustCompile(`model name\s*: (.*)`).FindSubmatch(info); model != nil {
		cpu = string(model[1])
	}
	return provenance{
		Date:   time.Now().UTC().Format(time.RFC3339),
		CPU:    cpu,
		Cores:  runtime.GOMAXPROCS(0),
		Kernel: output("uname", "-r"),
		Go:     runtime.Version(),
		Rust:   output("rustc", "--version"),
		Commit: output("git", "rev-parse", "HEAD"),
		Dirty:  output("git", "status", "--porcelain", "--untracked-files=no") != "",
		Crate:  crateVersion.FindStringSubmatch(peerLock)[1],
	}
}

// busySeconds returns the processor time that all processes of this machine have had
// since it started, with what other machines on the same host took from it.
func busySeconds() float64 {
	const userHz = 100
	data, _ := os.ReadFile("/proc/stat")
	var name string
	var user, nice, system, idle, ioWait, irq, softIRQ, steal float64
	fmt.Sscan(string(data), &name, &user, &nice, &system, &idle, &ioWait, &irq, &softIRQ, &steal)
	return (user + nice + system + irq + softIRQ + steal) / userHz
}

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
	for _, row := range rows(file.more()) {
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
	for _, row := range rows(f.more()) {
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

// more returns the arguments that all trials of a run have.
func (f results) more() []string {
	var more []string
	for _, t := range f.Trials {
		if t.Kind == "memory" {
			more = t.Args[1:]
		}
	}
	return more
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
