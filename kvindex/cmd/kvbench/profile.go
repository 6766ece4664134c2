// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"runtime"
	"runtime/pprof"
	"slices"
	"time"

	"github.com/google/pprof/profile"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/trial"
)

// agingCapacity is so small that a prefix that nobody promotes leaves the index in the
// first third of the bursts.
const agingCapacity = 50_000

// profileCommand says in Markdown where upstream's lookups spend their time in bursts, and
// how long they take by what they find.
func profileCommand(args []string, stdout io.Writer) error {
	flags := flag.NewFlagSet("kvbench profile", flag.ContinueOnError)
	name := flags.String("name", "upstream", "what the report calls this binary's upstream")
	bursts := flags.Int("bursts", fullSizes.bursts, "bursts")
	if err := flags.Parse(args); err != nil {
		return err
	}
	config := trial.BurstConfig{
		Capacity: fullSizes.capacity, Readers: shapes[0].readers, Blocks: shapes[0].blocks,
		Bursts: *bursts, Period: shapes[0].period, EventsPerSecond: 2_000,
		Deadline: time.Now().Add(5 * time.Minute),
	}
	found, err := takeProfiles(config)
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, "## %s\n\n%d lookups, %.0f events per second; %s, GOMAXPROCS %d.\n\n",
		*name, len(found.lookups), found.eventsPerSecond, runtime.Version(), runtime.GOMAXPROCS(0))
	found.write(stdout)

	config.FreshOnly, config.Capacity = true, agingCapacity
	config.Deadline = time.Now().Add(5 * time.Minute)
	lookups, err := burstOfUpstream(config, &profiles{})
	if err != nil {
		return err
	}
	writeByFound(stdout, lookups)
	return nil
}

// profiles are those of the Go runtime during a trial.
type profiles struct {
	lookups          []trial.Lookup
	eventsPerSecond  float64
	cpu, block, lock *profile.Profile
}

// takeProfiles runs a trial with every blocking event noted, and the usual 100 samples per
// second of each core.
func takeProfiles(config trial.BurstConfig) (*profiles, error) {
	var cpu bytes.Buffer
	var started error
	config.Filled = func() {
		runtime.SetMutexProfileFraction(1)
		runtime.SetBlockProfileRate(1)
		started = pprof.StartCPUProfile(&cpu)
	}
	p := new(profiles)
	lookups, err := burstOfUpstream(config, p)
	pprof.StopCPUProfile()
	runtime.SetMutexProfileFraction(0)
	runtime.SetBlockProfileRate(0)
	if err = errors.Join(err, started); err != nil {
		return nil, err
	}
	p.lookups = lookups
	if p.cpu, err = profile.Parse(&cpu); err != nil {
		return nil, fmt.Errorf("CPU profile: %w", err)
	}
	for name, to := range map[string]**profile.Profile{"block": &p.block, "mutex": &p.lock} {
		var text bytes.Buffer
		if err := pprof.Lookup(name).WriteTo(&text, 0); err != nil {
			return nil, err
		}
		if *to, err = profile.Parse(&text); err != nil {
			return nil, fmt.Errorf("%s profile: %w", name, err)
		}
	}
	return p, nil
}

func burstOfUpstream(config trial.BurstConfig, p *profiles) ([]trial.Lookup, error) {
	index, err := design.New("upstream", config.Capacity, podsPerKey)
	if err != nil {
		return nil, err
	}
	burst, lookups, err := trial.BurstLookups(index, config)
	if err != nil {
		return nil, err
	}
	if burst.Stopped {
		return nil, errors.New("the bursts did not end within 5 minutes")
	}
	p.eventsPerSecond = burst.EventsPerSecond
	return lookups, nil
}

// write says what lookups waited for and computed, and which locks were contended.
func (p *profiles) write(out io.Writer) {
	n := float64(len(p.lookups))
	var whole time.Duration
	for _, one := range p.lookups {
		whole += one.Service
	}
	waited := sum(p.block, waitingLookup)
	computed := sum(p.cpu, lookupPart)
	rest := float64(whole)
	fmt.Fprintf(out, "| of a lookup | mean µs | share |\n|---|---|---|\n")
	row := func(what string, ns float64) {
		fmt.Fprintf(out, "| %s | %.1f | %.1f %% |\n", what, ns/n/1e3, 100*ns/float64(whole))
	}
	for _, of := range []map[string]float64{waited, computed} {
		for _, what := range largest(of) {
			row(what, of[what])
			rest -= of[what]
		}
	}
	row("the rest: it waits for a core", rest)
	fmt.Fprintf(out, "| all of it | %.1f | |\n\n", whole.Seconds()*1e6/n)
	writeShares(out, "mutex profile: released late in", sum(p.lock, lockHolder), n)
	writeShares(out, "CPU profile", sum(p.cpu, cpuPart), n)
}

func writeShares(out io.Writer, head string, of map[string]float64, lookups float64) {
	total := 0.0
	for _, ns := range of {
		total += ns
	}
	fmt.Fprintf(out, "| %s | µs per lookup | share |\n|---|---|---|\n", head)
	for _, what := range largest(of) {
		if share := of[what] / total; share >= 0.005 {
			fmt.Fprintf(out, "| %s | %.1f | %.1f %% |\n", what, of[what]/lookups/1e3, 100*share)
		}
	}
	fmt.Fprintln(out)
}

// writeByFound shows how long lookups took by how much of their prefix they found.
func writeByFound(out io.Writer, lookups []trial.Lookup) {
	kinds := []struct {
		name string
		is   func(found float64) bool
	}{
		{"the whole prefix", func(found float64) bool { return found == 1 }},
		{"a part of it", func(found float64) bool { return found > 0 && found < 1 }},
		{"nothing: it breaks at the first block", func(found float64) bool { return found == 0 }},
	}
	fmt.Fprintf(out, "The same bursts while pods report other blocks alone, and room for %d keys:\n\n", agingCapacity)
	fmt.Fprintf(out, "| a lookup found | lookups | p10 µs | p50 µs | p90 µs | p99 µs |\n|---|---|---|---|---|---|\n")
	for _, kind := range kinds {
		var took []time.Duration
		for _, one := range lookups {
			if kind.is(one.Found) {
				took = append(took, one.Service)
			}
		}
		if len(took) == 0 {
			fmt.Fprintf(out, "| %s | 0 | | | | |\n", kind.name)
			continue
		}
		slices.Sort(took)
		at := func(share float64) float64 { return took[int(share*float64(len(took)-1))].Seconds() * 1e6 }
		fmt.Fprintf(out, "| %s | %d | %.1f | %.1f | %.1f | %.1f |\n", kind.name, len(took), at(.1), at(.5), at(.9), at(.99))
	}
	fmt.Fprintln(out)
}
