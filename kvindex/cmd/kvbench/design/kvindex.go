// SPDX-License-Identifier: Apache-2.0

package design

import "kvtax/kvindex"

// kvindexIndex is the index of package kvindex.
type kvindexIndex struct {
	*kvindex.Index[string]
}

func newKvindex(capacity, podsPerKey int) (Index, error) {
	x, err := kvindex.New[string](kvindex.Config{Capacity: capacity, MaxPodsPerKey: podsPerKey})
	return kvindexIndex{x}, err
}

func (x kvindexIndex) Add(chain []uint64, pod string) { x.Index.Add(chain, pod) }

func (x kvindexIndex) Evict(key uint64, pod string) { x.Index.Evict(key, pod) }

func (x kvindexIndex) NewReader() Reader { return &kvindexReader{index: x.Index} }

type kvindexReader struct {
	index  *kvindex.Index[string]
	scores []kvindex.PodScore[string]
}

func (r *kvindexReader) Lookup(chain []uint64) {
	r.scores = r.index.Score(chain, r.scores)
}

func (r *kvindexReader) Prefix() int {
	best := 0
	for _, score := range r.scores {
		best = max(best, score.Blocks)
	}
	return best
}
