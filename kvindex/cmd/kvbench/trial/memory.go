// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"fmt"
	"math/rand/v2"
	"runtime"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/results"
)

// MemoryConfig is what an index is filled with.
type MemoryConfig struct {
	Keys       int
	PodsPerKey int
	Sets       string // one of PodSets
}

// How many pod sets there are: one, fewSets, or one for each key.
const (
	IdenticalSets = "identical"
	FewSets       = "few"
	DifferentSets = "different"
)

// PodSets are the choices of MemoryConfig.Sets.
var PodSets = []string{IdenticalSets, FewSets, DifferentSets}

const fewSets = 64

// podsToChooseFrom is how many times as many pods there are as a key has, if sets
// differ.
const podsToChooseFrom = 4

// Memory fills the index that open makes, and measures by how much the heap grows.
func Memory(open func() (design.Index, error), config MemoryConfig) (*results.Memory, error) {
	if config.Keys < 1 || config.PodsPerKey < 1 {
		return nil, fmt.Errorf("memory of %d keys with %d pods: at least 1 is needed of both", config.Keys, config.PodsPerKey)
	}
	chooser := newSetChooser(config.PodsPerKey)
	fill, ok := map[string]func(design.Index, int){
		IdenticalSets: func(x design.Index, keys int) { chooser.fillFromSets(x, keys, 1) },
		FewSets:       func(x design.Index, keys int) { chooser.fillFromSets(x, keys, fewSets) },
		DifferentSets: chooser.fillDifferent,
	}[config.Sets]
	if !ok {
		return nil, fmt.Errorf("no pod sets are named %q; there are %v", config.Sets, PodSets)
	}
	before := heapBytes()
	index, err := open()
	if err != nil {
		return nil, err
	}
	fill(index, config.Keys)
	result := &results.Memory{
		Keys:        config.Keys,
		PodsPerKey:  config.PodsPerKey,
		Sets:        config.Sets,
		BytesPerKey: float64(heapBytes()-before) / float64(config.Keys),
		Len:         index.Len(),
	}
	runtime.KeepAlive(chooser)
	return result, nil
}

// heapBytes returns the size of all that is reachable. The second collection frees what
// the first one finalized.
func heapBytes() int64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// A setChooser draws sets of pods.
type setChooser struct {
	pods   []string // the first podsPerKey are the last set drawn
	perKey int
	random *rand.Rand
}

func newSetChooser(podsPerKey int) *setChooser {
	return &setChooser{
		pods:   podNames(podsToChooseFrom * podsPerKey),
		perKey: podsPerKey,
		random: rand.New(rand.NewPCG(2, 2)),
	}
}

// draw returns a random set, valid until the next call (the beginning of a
// Fisher-Yates shuffle).
func (c *setChooser) draw() []string {
	for i := range c.perKey {
		other := i + c.random.IntN(len(c.pods)-i)
		c.pods[i], c.pods[other] = c.pods[other], c.pods[i]
	}
	return c.pods[:c.perKey]
}

// fillFromSets adds chains that take the sets in turn.
func (c *setChooser) fillFromSets(index design.Index, keys, sets int) {
	drawn := make([][]string, sets)
	for i := range drawn {
		drawn[i] = append([]string(nil), c.draw()...)
	}
	const blocks = 256
	chain := make([]uint64, blocks)
	for first := 0; first < keys; first += blocks {
		part := chain[:min(blocks, keys-first)]
		fillKeys(part, uint64(first))
		for _, pod := range drawn[first/blocks%sets] {
			index.Add(part, pod)
		}
	}
}

// fillDifferent adds each key with a set of its own.
func (c *setChooser) fillDifferent(index design.Index, keys int) {
	key := make([]uint64, 1)
	for n := range keys {
		fillKeys(key, uint64(n))
		for _, pod := range c.draw() {
			index.Add(key, pod)
		}
	}
}
