// SPDX-License-Identifier: Apache-2.0

// Package design holds the prefix indexes under test behind one interface: upstream's,
// the shape that llm-d's router merged, ours, and an exact LRU as the reference.
package design

import (
	"fmt"
	"slices"
	"strings"

	"kvtax/kvindex"
)

// An Index is a prefix index under test. Its methods may be called at any time from any
// goroutine.
type Index interface {
	// Add notes that a pod holds the blocks of a chain of keys, given head first.
	Add(chain []uint64, pod string)
	// Evict notes that a pod no longer holds the block of a key.
	Evict(key uint64, pod string)
	// NewReader returns a Reader for one goroutine.
	NewReader() Reader
	// Len returns the number of keys held.
	Len() int
}

// A Reader looks chains up, in one goroutine.
type Reader interface {
	// Lookup is all that a router has to wait for, and counts as a read of the chain.
	// This alone is timed.
	Lookup(chain []uint64)
	// Prefix returns how many leading blocks the best pod held at the last Lookup. It
	// is not timed.
	Prefix() int
}

// designs are the indexes under test, in the order in which reports name them.
var designs = []struct {
	name string
	make func(capacity, podsPerKey int) (Index, error)
}{
	{"upstream", newUpstream},
	{"merged", newMerged},
	{"kvindex", newKvindex},
	{"exact-lru", newExactLRU},
}

// Names returns the names of the designs, in the order in which reports name them.
func Names() []string {
	names := make([]string, len(designs))
	for i, d := range designs {
		names[i] = d.name
	}
	return names
}

// New returns an empty index of a design. It holds at most capacity keys, and at most
// podsPerKey pods for each.
func New(name string, capacity, podsPerKey int) (Index, error) {
	if capacity < 1 || podsPerKey < 1 {
		return nil, fmt.Errorf("design %s: %d keys with %d pods each, at least 1 is needed of both", name, capacity, podsPerKey)
	}
	names := Names()
	i := slices.Index(names, name)
	if i < 0 {
		return nil, fmt.Errorf("no design is named %q; there are %s", name, strings.Join(names, ", "))
	}
	index, err := designs[i].make(capacity, podsPerKey)
	if err != nil {
		return nil, fmt.Errorf("design %s: %w", name, err)
	}
	return index, nil
}

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
