// SPDX-License-Identifier: Apache-2.0

// Kvbench compares indexes of KV-cache blocks by what a router has to wait for.
//
//	kvbench run -traces DIR -out FILE    measures everything
//	kvbench report -in FILE -readme FILE -md FILE says what was measured
//	kvbench trial KIND -design NAME ...           measures one thing, for run
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/report"
	"kvtax/kvindex/cmd/kvbench/results"
	"kvtax/kvindex/cmd/kvbench/trial"
)

const usage = `usage: kvbench run|report|trial [flags]; each tells its flags with -h`

func main() {
	if err := command(os.Args[1:], os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "kvbench:", err)
		os.Exit(1)
	}
}

func command(args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		return fmt.Errorf("no command\n%s", usage)
	}
	switch args[0] {
	case "run":
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
		defer stop()
		return runCommand(ctx, args[1:], stderr)
	case "report":
		return reportCommand(args[1:])
	case "trial":
		return trialCommand(args[1:], stdout)
	}
	return fmt.Errorf("no command is named %q\n%s", args[0], usage)
}

// reportCommand says what was measured, in a README, in a file of its own, or both.
func reportCommand(args []string) error {
	flags := flag.NewFlagSet("kvbench report", flag.ContinueOnError)
	in := flags.String("in", "results.json", "results of a run")
	readme := flags.String("readme", "", "README whose lines between the markers are replaced")
	md := flags.String("md", "", "file for the whole report")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *readme == "" && *md == "" {
		return errors.New("report: neither -readme nor -md says where to")
	}
	file, err := results.Read(*in)
	if err != nil {
		return err
	}
	if *md != "" {
		if err := results.Replace(*md, []byte(report.Whole(file))); err != nil {
			return err
		}
	}
	if *readme == "" {
		return nil
	}
	old, err := os.ReadFile(*readme)
	if err != nil {
		return err
	}
	text, err := report.Replace(string(old), report.Short(file))
	if err != nil {
		return fmt.Errorf("%s: %w", *readme, err)
	}
	return results.Replace(*readme, []byte(text))
}

// podsPerKey is upstream's default bound.
const podsPerKey = 10

// trialFlags are those of all kinds of trials; each kind reads its own.
type trialFlags struct {
	design   string
	capacity int
	keys     int
	readers  int
	blocks   int
	bursts   int
	period   time.Duration
	events   float64
	limit    time.Duration
	duration time.Duration
	pods     int
	sets     string
	trace    string
	traces   string
}

// trialCommand measures one thing and writes it to stdout, as JSON.
func trialCommand(args []string, stdout io.Writer) error {
	if len(args) == 0 {
		return fmt.Errorf("trial: no kind; there are %s", strings.Join(results.Kinds, ", "))
	}
	var f trialFlags
	flags := flag.NewFlagSet("kvbench trial "+args[0], flag.ContinueOnError)
	flags.StringVar(&f.design, "design", "", "index under test: "+strings.Join(design.Names(), ", "))
	flags.IntVar(&f.capacity, "capacity", 200_000, "keys held at most")
	flags.IntVar(&f.keys, "keys", 1_000_000, "walk, memory: keys")
	flags.IntVar(&f.readers, "readers", 64, "burst: readers")
	flags.IntVar(&f.blocks, "blocks", 263, "burst, walk: blocks in a chain")
	flags.IntVar(&f.bursts, "bursts", 20, "burst: bursts")
	flags.DurationVar(&f.period, "period", 250*time.Millisecond, "burst: from one to the next")
	flags.Float64Var(&f.events, "events", 2_000, "burst: events of 16 keys a second, from all writers together")
	flags.DurationVar(&f.limit, "limit", time.Minute, "burst: stop after this time")
	flags.DurationVar(&f.duration, "duration", time.Second, "writes: measure each figure for this time")
	flags.IntVar(&f.pods, "pods", podsPerKey, "memory: pods that hold a key")
	flags.StringVar(&f.sets, "sets", trial.IdenticalSets, "memory: pod sets: "+strings.Join(trial.PodSets, ", "))
	flags.StringVar(&f.trace, "trace", "", "replay: name of the trace")
	flags.StringVar(&f.traces, "traces", "", "replay: folder of the traces")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	result, err := measure(args[0], f)
	if err != nil {
		return fmt.Errorf("trial %s: %w", args[0], err)
	}
	return json.NewEncoder(stdout).Encode(result)
}

func measure(kind string, f trialFlags) (any, error) {
	deadline := time.Now().Add(f.limit)
	if kind == results.KindMemory { // it makes the index itself
		return trial.Memory(
			func() (design.Index, error) { return design.New(f.design, f.keys, f.pods) },
			trial.MemoryConfig{Keys: f.keys, PodsPerKey: f.pods, Sets: f.sets})
	}
	capacity := f.capacity
	if kind == results.KindWalk {
		capacity = f.keys
	}
	index, err := design.New(f.design, capacity, podsPerKey)
	if err != nil {
		return nil, err
	}
	switch kind {
	case results.KindBurst:
		return trial.Burst(index, trial.BurstConfig{
			Capacity:        f.capacity,
			Readers:         f.readers,
			Blocks:          f.blocks,
			Bursts:          f.bursts,
			Period:          f.period,
			EventsPerSecond: f.events,
			Deadline:        deadline,
		})
	case results.KindWalk:
		return trial.Walk(index, trial.WalkConfig{Keys: f.keys, Blocks: f.blocks})
	case results.KindWrites:
		return trial.Writes(index, trial.WritesConfig{Capacity: f.capacity, Duration: f.duration})
	case results.KindReplay:
		return trial.Replay(index, f.trace, f.traces, f.capacity)
	}
	return nil, fmt.Errorf("no such kind; there are %s", strings.Join(results.Kinds, ", "))
}
