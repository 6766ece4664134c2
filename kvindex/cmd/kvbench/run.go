// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"kvtax/kvindex/cmd/kvbench/results"
)

// runFlags are those of the run command.
type runFlags struct {
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
	binary, err := os.Executable()
	if err != nil {
		return err
	}
	provenance, err := results.Machine(binary)
	if err != nil {
		return err
	}
	provenance.Rounds, provenance.Seed, provenance.Quick = f.rounds, f.seed, f.quick
	file := &results.File{Provenance: provenance, Planned: len(specs), Trials: []results.Trial{}}
	progress := newProgress(specs)
	failed := 0
	for _, s := range specs {
		t := runTrial(ctx, binary, s)
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

const (
	// A burst trial stops by itself after a minute, others end sooner; one that does not
	// is killed.
	killAfter = 3 * time.Minute
	// waitDelay is how long a killed trial may keep its output open.
	waitDelay = 5 * time.Second
	// stderrBytes is how much of the end of a failed trial's stderr is kept.
	stderrBytes = 2000
)

// runTrial runs one trial in a process of its own, and returns when that is gone. The
// process is killed when the context ends.
func runTrial(ctx context.Context, binary string, s spec) results.Trial {
	t := results.Trial{
		Kind:        s.kind,
		Design:      s.design,
		Round:       s.round,
		GOMAXPROCS:  s.gomaxprocs,
		Args:        withoutFolders(s.args),
		LoadAverage: results.LoadAverage(),
	}
	limited, cancel := context.WithTimeout(ctx, killAfter)
	defer cancel()
	var stdout, stderr bytes.Buffer
	child := exec.CommandContext(limited, binary, append([]string{"trial", s.kind}, s.args...)...)
	child.Env = append(os.Environ(), fmt.Sprint("GOMAXPROCS=", s.gomaxprocs))
	child.Stdout, child.Stderr = &stdout, &stderr
	child.WaitDelay = waitDelay
	child.SysProcAttr = diesWithParent()

	begin, busy := time.Now(), results.BusySeconds()
	err := child.Run()
	elapsed := time.Since(begin).Seconds()
	t.Seconds, t.OtherCores = elapsed, -1
	if after := results.BusySeconds(); busy >= 0 && child.ProcessState != nil {
		own := child.ProcessState.UserTime() + child.ProcessState.SystemTime()
		t.OtherCores = max(0, (after-busy-own.Seconds())/elapsed)
	}
	if err == nil {
		err = json.Unmarshal(stdout.Bytes(), t.Result())
	}
	if err != nil {
		t.Burst, t.Walk, t.Memory, t.Writes, t.Replay = nil, nil, nil, nil, nil
		t.Failure = failure(limited, err, stderr.Bytes())
	}
	return t
}

// failure says why a trial has no result.
func failure(ctx context.Context, err error, stderr []byte) string {
	if ctx.Err() == context.DeadlineExceeded {
		err = fmt.Errorf("killed after %v", killAfter)
	}
	end := stderr[max(0, len(stderr)-stderrBytes):]
	return strings.TrimSpace(fmt.Sprintf("%v\n%s", err, strings.ToValidUTF8(string(end), "?")))
}

// withoutFolders returns flags without the one that is another on each machine.
func withoutFolders(args []string) []string {
	kept := slices.Clone(args)
	if i := slices.Index(kept, "-traces"); i >= 0 {
		kept = slices.Delete(kept, i, i+2)
	}
	return kept
}
