// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"

	"kvtax/kvindex"
	"kvtax/kvindex/cmd/kvindexd/blockhash"
	"kvtax/kvindex/cmd/kvindexd/names"
)

// lowerTier is what a block in a lower medium counts in a score, beside 1 in the GPU:
// the weight that llm-d's tiered scorer gives to one in the CPU's memory.
const lowerTier = 0.8

// A Query is a prompt: its token ids, with what else decides what its blocks hold, or
// else the names of its blocks. Model is what a request names: it counts as the adapter if
// there are blocks of an adapter with that name.
type Query struct {
	IDs   []uint32
	Model string
	Extra blockhash.Extra
	Names []uint64
}

// A Holding is what an instance holds of a prompt.
type Holding struct {
	Instance    *Instance
	BlockTokens int // 0 if nothing can be said of the instance
	Blocks      int // that lead the prompt, in the GPU
	Further     int // that follow these, in one lower medium
	Medium      uint8
}

// Score is 1 for each leading block, and 0.8 for each further one.
func (h *Holding) Score() float64 { return float64(h.Blocks) + lowerTier*float64(h.Further) }

// Medium returns the name of a Holding's medium.
func (f *Fleet) Medium(n uint8) string { return f.media.all()[n] }

// A Reader looks prompts up. It keeps buffers, so it is for one goroutine at a time.
type Reader struct {
	fleet    *Fleet
	namers   map[names.HashScheme]*names.Namer
	names    []uint64
	scores   []kvindex.PodScore[holder]
	further  []kvindex.PodScore[holder]
	holdings []Holding
}

// NewReader returns a Reader of the fleet.
func (f *Fleet) NewReader() *Reader {
	return &Reader{fleet: f, namers: make(map[names.HashScheme]*names.Namer)}
}

// Lookup returns what each instance holds of a prompt, in the order of the fleet. With
// token ids, that is at most what lies before the last one: vLLM computes at least that.
// It is valid until the next call.
func (r *Reader) Lookup(q *Query) []Holding {
	r.holdings = r.holdings[:0]
	for _, instance := range r.fleet.instances {
		holding := Holding{Instance: instance}
		if scheme := instance.answers.Load(); scheme != nil {
			holding.BlockTokens = scheme.BlockTokens
		}
		r.holdings = append(r.holdings, holding)
	}
	if len(q.Names) > 0 {
		r.tally(q.Names)
		return r.holdings
	}
	ids := q.IDs[:max(0, len(q.IDs)-1)]
	extra := q.Extra
	if extra.LoRA == "" && slices.Contains(r.fleet.adapters.all(), q.Model) {
		extra.LoRA = q.Model
	}
	for _, scheme := range r.fleet.schemes.all() {
		namer := r.namers[scheme]
		if namer == nil {
			namer = names.NewNamer(r.fleet.memo, scheme)
			r.namers[scheme] = namer
		}
		for _, style := range extra.Styles() {
			r.names = namer.Append(r.names[:0], ids, &extra, style, r.held)
			r.tally(r.names)
		}
	}
	return r.holdings
}

// held says whether anybody has a block.
func (r *Reader) held(name uint64) bool {
	r.scores = r.fleet.index.Score([]uint64{name}, r.scores)
	return len(r.scores) > 0
}

// tally adds what is held of a chain of names. An instance has blocks of one way and one
// style only, so what is found by others does not count twice.
func (r *Reader) tally(chain []uint64) {
	r.scores = r.fleet.index.Score(chain, r.scores)
	for _, score := range r.scores {
		holding := &r.holdings[score.Pod.instance]
		if score.Pod.medium == 0 && holding.BlockTokens > 0 {
			holding.Blocks = max(holding.Blocks, score.Blocks)
		}
	}
	scored := -1
	for n := range r.holdings {
		holding := &r.holdings[n]
		if holding.BlockTokens == 0 || !holding.Instance.tiered.Load() || holding.Blocks > len(chain) {
			continue
		}
		if holding.Blocks != scored {
			scored = holding.Blocks
			r.further = r.fleet.index.Score(chain[scored:], r.further)
		}
		r.tallyFurther(holding)
	}
}

// tallyFurther takes over what follows the leading blocks of an instance in one of its
// other media, where vLLM's offloading connectors go on.
func (r *Reader) tallyFurther(holding *Holding) {
	for _, score := range r.further {
		at := score.Pod
		if at.instance == holding.Instance.number && at.medium > 0 && score.Blocks > holding.Further {
			holding.Further, holding.Medium = score.Blocks, at.medium
		}
	}
}
