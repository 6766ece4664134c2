// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"time"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/results"
)

// WalkConfig is an index full of chains that have all the same pods.
type WalkConfig struct {
	Keys   int
	Blocks int // in a chain
}

const (
	// A batch is long enough that reading the clock does not count.
	chainsPerBatch = 16
	// A round has a part for the index and one for the floor, so that both meet the
	// same disturbances.
	batchesPerRound = 16
	// slotBytes and load are those of the table whose size the floor's memory has.
	slotBytes = 16
	tableLoad = 0.65
)

// A pair is one slot of the floor's memory.
type pair struct{ key, word uint64 }

// walk is a trial under way.
type walk struct {
	reader design.Reader
	chains [chainsPerBatch][]uint64
	memory []pair
	at     [][]uint32 // the floor's loads, chain by chain
	random *rand.Rand
	sum    uint64
}

// Walk measures single-threaded lookups of whole chains, and the floor that memory sets.
func Walk(index design.Index, config WalkConfig) (*results.Walk, error) {
	count := config.Keys / max(config.Blocks, 1)
	if config.Blocks < 1 || count < chainsPerBatch*batchesPerRound {
		return nil, fmt.Errorf("a walk needs at least %d chains of at least 1 block", chainsPerBatch*batchesPerRound)
	}
	fillChains(index, count, config.Blocks)
	w := newWalk(index.NewReader(), count*config.Blocks, config.Blocks)
	order := w.random.Perm(count)
	first, floor, firstRatio := w.pass(order)
	stamped, _, stampedRatio := w.pass(order)
	result := &results.Walk{
		Keys:           count * config.Blocks,
		Blocks:         config.Blocks,
		HotNs:          w.hot(),
		ColdFirstNs:    first,
		ColdStampedNs:  stamped,
		FloorBytes:     len(w.memory) * slotBytes,
		FloorNs:        floor,
		FirstToFloor:   firstRatio,
		StampedToFloor: stampedRatio,
		Prefix:         w.reader.Prefix(),
	}
	if w.sum == 0 {
		return nil, errors.New("the floor's memory holds nothing but zeros")
	}
	return result, nil
}

// fillChains adds chains that the same pods hold.
func fillChains(index design.Index, count, blocks int) {
	keys := make([]uint64, blocks)
	for n := range count {
		fillKeys(keys, uint64(n*blocks))
		for _, pod := range podNames(podsPerChain) {
			index.Add(keys, pod)
		}
	}
}

func newWalk(reader design.Reader, keys, blocks int) *walk {
	w := &walk{
		reader: reader,
		memory: make([]pair, int(float64(keys)/tableLoad)),
		at:     make([][]uint32, chainsPerBatch),
		random: rand.New(rand.NewPCG(1, 1)),
	}
	for i := range w.memory {
		w.memory[i] = pair{uint64(i), 1} // memory that was never written is not there
	}
	for i := range w.chains {
		w.chains[i] = make([]uint64, blocks)
		w.at[i] = make([]uint32, blocks)
	}
	return w
}

// pass visits each chain once. It returns the medians of the time a chain takes, of the
// floor, and of the ratio of the two in a round.
func (w *walk) pass(order []int) (chainNs, floorNs, ratio float64) {
	const chainsPerRound = chainsPerBatch * batchesPerRound
	var chains, floors, ratios []float64
	for ; len(order) >= chainsPerRound; order = order[chainsPerRound:] {
		var chainSum, floorSum float64
		for batch := range batchesPerRound {
			ns := w.chainBatch(order[batch*chainsPerBatch:])
			chains = append(chains, ns)
			chainSum += ns
		}
		for range batchesPerRound {
			ns := w.floorBatch()
			floors = append(floors, ns)
			floorSum += ns
		}
		ratios = append(ratios, chainSum/floorSum)
	}
	return median(chains), median(floors), median(ratios)
}

// chainBatch looks a batch of chains up, and returns nanoseconds a chain. The keys are
// computed ahead: a router has just hashed them.
func (w *walk) chainBatch(order []int) float64 {
	for i := range w.chains {
		fillKeys(w.chains[i], uint64(order[i]*len(w.chains[i])))
	}
	begin := time.Now()
	for i := range w.chains {
		w.reader.Lookup(w.chains[i])
	}
	return float64(time.Since(begin)) / chainsPerBatch
}

// floorBatch loads as much from random places of memory, each load independent of the
// others, and returns nanoseconds a chain.
func (w *walk) floorBatch() float64 {
	for _, chain := range w.at {
		for i := range chain {
			place, _ := bits.Mul64(w.random.Uint64(), uint64(len(w.memory)))
			chain[i] = uint32(place)
		}
	}
	begin := time.Now()
	sum := uint64(0)
	for _, chain := range w.at {
		for _, place := range chain {
			p := &w.memory[place]
			sum += p.key + p.word
		}
	}
	elapsed := time.Since(begin)
	w.sum += sum
	return float64(elapsed) / chainsPerBatch
}

// hot looks the same chain up again and again, and returns nanoseconds a lookup.
func (w *walk) hot() float64 {
	const rounds, lookups = 200, 64
	var each []float64
	for range rounds {
		begin := time.Now()
		for range lookups {
			w.reader.Lookup(w.chains[0])
		}
		each = append(each, float64(time.Since(begin))/lookups)
	}
	return median(each)
}

// median returns the middle one of the values, or of two the higher.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
