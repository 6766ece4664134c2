// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"kvtax/kvindex/cmd/kvbench/results"
	"kvtax/kvindex/cmd/kvbench/trial"
)

// Designs that take part in each kind of trial.
var (
	burstDesigns   = []string{"upstream", "merged", "kvindex"}
	scalingDesigns = burstDesigns
	// Upstream is not among those that walk 4 million keys: it would need 10 GB.
	walkDesigns   = []string{"merged", "kvindex"}
	memoryDesigns = burstDesigns
	writesDesigns = burstDesigns
	// Upstream is slow at it, and its recency is that of exact-lru.
	replayDesigns = []string{"exact-lru", "merged", "kvindex"}
)

// A shape is the size of a burst. The first is the one that is measured on fewer cores,
// too.
type shape struct {
	readers, blocks int
	period          time.Duration
}

var shapes = []shape{
	{64, 263, 250 * time.Millisecond},
	{128, 263, 250 * time.Millisecond},
	{64, 1024, 500 * time.Millisecond},
}

// replays are the capacities for each trace: from some that hold little of it to some
// that hold most.
var replays = []struct {
	trace      string
	capacities []int
}{
	{"synthetic", []int{10_000, 40_000, 80_000}},
	{"sessions-le62k", []int{2_000, 5_000, 10_000}},
	{"conversation", []int{10_000, 40_000, 80_000}},
	{"sessions-any", []int{20_000, 40_000, 80_000}},
}

// memoryPods are the pods that hold a key, and how many keys there are then: a filling
// takes time with the number of both, and longer if sets differ.
var memoryPods = []struct {
	pods, keys, keysIfDifferent, keysUpstream int
}{
	{10, 1_000_000, 200_000, 200_000},
	{40, 200_000, 20_000, 50_000},
	{200, 20_000, 5_000, 5_000},
}

// sizes are what makes a run long or quick.
type sizes struct {
	capacity   int
	bursts     int
	shorten    time.Duration // what periods are divided by
	walkKeys   int
	memoryPart int // what numbers of keys are divided by
	writes     time.Duration
	replays    int // traces
	capacities int // of each trace
}

var (
	fullSizes  = sizes{200_000, 20, 1, 4_000_000, 1, time.Second / 2, 4, 3}
	quickSizes = sizes{20_000, 3, 5, 100_000, 100, 10 * time.Millisecond, 2, 1}
)

// A spec is one trial to be run.
type spec struct {
	design     string
	kind       string
	round      int
	gomaxprocs int
	args       []string
	expected   time.Duration
}

func (s spec) String() string {
	return fmt.Sprintf("round %d, GOMAXPROCS %d: %s %s %v", s.round, s.gomaxprocs, s.kind, s.design, s.args)
}

// A planner lists the trials of a run.
type planner struct {
	sizes  sizes
	kinds  []string
	cores  int
	traces string
	random *rand.Rand
	specs  []spec
}

// plan returns all trials, those of a round together, and in each round the designs
// in another order. What does not depend on time is measured once.
func plan(kinds []string, rounds, cores int, quick bool, traces string, seed uint64) []spec {
	p := &planner{sizes: fullSizes, kinds: kinds, cores: cores, traces: traces, random: rand.New(rand.NewPCG(seed, 0))}
	if quick {
		p.sizes = quickSizes
	}
	for round := range rounds {
		p.bursts(round + 1)
		p.scaling(round + 1)
		p.walks(round + 1)
		p.writes(round + 1)
	}
	p.memory()
	p.replays()
	return p.specs
}

// add plans a trial of each design, in random order.
func (p *planner) add(kind string, round, gomaxprocs int, expected time.Duration, designs []string, args func(design string) []string) {
	if !slices.Contains(p.kinds, kind) {
		return
	}
	for _, i := range p.random.Perm(len(designs)) {
		p.specs = append(p.specs, spec{designs[i], kind, round, gomaxprocs, args(designs[i]), expected})
	}
}

func (p *planner) bursts(round int) {
	for _, s := range shapes {
		p.burst(round, p.cores, s, burstDesigns)
	}
}

// scaling measures the first shape on fewer cores than there are.
func (p *planner) scaling(round int) {
	for cores := 1; cores < p.cores; cores *= 2 {
		p.burst(round, cores, shapes[0], scalingDesigns)
	}
}

func (p *planner) burst(round, gomaxprocs int, s shape, designs []string) {
	period := s.period / p.sizes.shorten
	args := flags("capacity", p.sizes.capacity, "readers", s.readers, "blocks", s.blocks,
		"bursts", p.sizes.bursts, "period", period)
	expected := period*time.Duration(p.sizes.bursts) + time.Second
	p.add(results.KindBurst, round, gomaxprocs, expected, designs, args)
}

func (p *planner) walks(round int) {
	p.add(results.KindWalk, round, p.cores, 10*time.Second, walkDesigns,
		flags("keys", p.sizes.walkKeys, "blocks", shapes[0].blocks))
}

func (p *planner) writes(round int) {
	p.add(results.KindWrites, round, p.cores, 5*p.sizes.writes, writesDesigns,
		flags("capacity", p.sizes.capacity, "duration", p.sizes.writes))
}

func (p *planner) memory() {
	for _, m := range memoryPods {
		for _, sets := range trial.PodSets {
			p.add(results.KindMemory, 1, p.cores, 3*time.Second, memoryDesigns, func(design string) []string {
				keys := m.keys
				if sets == trial.DifferentSets {
					keys = m.keysIfDifferent
				}
				if design == "upstream" {
					keys = min(keys, m.keysUpstream)
				}
				return flags("keys", max(100, keys/p.sizes.memoryPart), "pods", m.pods, "sets", sets)(design)
			})
		}
	}
}

func (p *planner) replays() {
	for _, r := range replays[:p.sizes.replays] {
		for _, capacity := range r.capacities[:p.sizes.capacities] {
			p.add(results.KindReplay, 1, p.cores, 2*time.Second, replayDesigns,
				flags("trace", r.trace, "traces", p.traces, "capacity", capacity))
		}
	}
}

// flags returns what gives a trial these flags and its design. They come in pairs of
// name and value.
func flags(pairs ...any) func(design string) []string {
	return func(design string) []string {
		args := []string{"-design", design}
		for i := 0; i < len(pairs); i += 2 {
			args = append(args, fmt.Sprint("-", pairs[i]), fmt.Sprint(pairs[i+1]))
		}
		return args
	}
}
