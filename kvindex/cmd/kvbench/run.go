// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"kvtax/kvindex/cmd/kvbench/results"
)

// runFlags are those of the run command.
type runFlags struct {
	bin    string
	traces string
	out    string
	rounds int
	seed   uint64
	quick  bool
	only   string
}

// runCommand measures everything, a process for each trial, and keeps what it has in a
// file.
func runCommand(ctx context.Context, args []string, stderr io.Writer) error {
	var f runFlags
	flags := flag.NewFlagSet("kvbench run", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&f.bin, "bin", "", "folder of the binaries that build_variants.sh makes")
	flags.StringVar(&f.traces, "traces", "", "folder of the traces")
	flags.StringVar(&f.out, "out", "results.json", "file for the results")
	flags.IntVar(&f.rounds, "rounds", 5, "how often each trial that takes time is run")
	flags.Uint64Var(&f.seed, "seed", rand.Uint64N(1_000_000), "decides on the order of trials")
	flags.BoolVar(&f.quick, "quick", false, "one round, tiny: to see that everything works")
	flags.StringVar(&f.only, "only", strings.Join(results.Kinds, ","), "kinds of trials")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if f.quick {
		f.rounds = 1
	}
	var err error
	if f.bin, err = filepath.Abs(f.bin); err != nil { // a bare name is looked for on the PATH
		return err
	}
	kinds := strings.Split(f.only, ",")
	for _, kind := range kinds {
		if !slices.Contains(results.Kinds, kind) {
			return fmt.Errorf("-only: no kind is named %q; there are %s", kind, strings.Join(results.Kinds, ", "))
		}
	}
	if f.rounds < 1 {
		return errors.New("-rounds: at least 1 is needed")
	}
	specs := plan(kinds, f.rounds, runtime.GOMAXPROCS(0), f.quick, f.traces, f.seed)
	if err := checkInputs(f, specs); err != nil {
		return err
	}
	unlock, err := results.Lock(f.out)
	if err != nil {
		return err
	}
	defer unlock()
	return f.run(ctx, specs, stderr)
}

// checkInputs refuses a run for which something is missing before it begins.
func checkInputs(f runFlags, specs []spec) error {
	var missing []string
	for _, s := range specs {
		path := filepath.Join(f.bin, s.binary)
		if _, err := os.Stat(path); err != nil && !slices.Contains(missing, path) {
			missing = append(missing, path)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("-bin: there is no %s: build_variants.sh makes it", strings.Join(missing, ", "))
	}
	for _, s := range specs {
		if _, err := os.Stat(f.traces); s.kind == results.KindReplay && err != nil {
			return fmt.Errorf("-traces: %w", err)
		}
	}
	return nil
}

// run runs the trials in turn. The results are written after each.
func (f runFlags) run(ctx context.Context, specs []spec, stderr io.Writer) error {
	// A trial dies with the thread that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	provenance, err := results.Machine(filepath.Join(f.bin, mainBinary))
	if err != nil {
		return err
	}
	provenance.Rounds, provenance.Seed, provenance.Quick = f.rounds, f.seed, f.quick
	file := &results.File{Provenance: provenance, Planned: len(specs), Trials: []results.Trial{}}
	progress := newProgress(specs)
	failed := 0
	for _, s := range specs {
		t := runTrial(ctx, f.bin, s)
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted: %s has %d of %d trials", f.out, len(file.Trials), len(specs))
		}
		file.Trials = append(file.Trials, t)
		if err := file.Write(f.out); err != nil {
			return err
		}
		if t.Failure != "" {
			failed++
		}
		progress.done(stderr, s, t)
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d trials failed: %s says why", failed, len(specs), f.out)
	}
	return nil
}

// progress says how far a run is.
type progress struct {
	begin    time.Time
	finished int
	total    int
	past     time.Duration // what the finished trials were expected to take
	left     time.Duration // what the others are expected to take
}

func newProgress(specs []spec) *progress {
	p := &progress{begin: time.Now(), total: len(specs)}
	for _, s := range specs {
		p.left += s.expected
	}
	return p
}

func (p *progress) done(stderr io.Writer, s spec, t results.Trial) {
	p.finished++
	p.past += s.expected
	p.left -= s.expected
	left := float64(time.Since(p.begin)) * float64(p.left) / float64(p.past)
	outcome := ""
	switch {
	case t.Failure != "":
		outcome = "FAILED: " + t.Failure
	case t.Burst != nil:
		outcome = fmt.Sprintf("p50 %.0f us, p99 %.0f us, %.0f events/s", t.Burst.Latency.P50Us, t.Burst.Latency.P99Us, t.Burst.EventsPerSecond)
	}
	fmt.Fprintf(stderr, "%d/%d, %v left; %v; %s\n", p.finished, p.total, time.Duration(left).Round(time.Second), s, outcome)
}
