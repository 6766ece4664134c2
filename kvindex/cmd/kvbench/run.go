// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"
)

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

// rows are all lines of the tables.
func rows() []row {
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
		newRow("cold", "blocks=263 holders=10", "one reader, 263 blocks of 1 M, in random order"),
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
		all = append(all, newRow("memory", "holders="+pods, "1 M blocks on "+pods+" pods"))
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
		for n, row := range rows() {
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
