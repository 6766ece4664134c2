// SPDX-License-Identifier: Apache-2.0

package design

import (
	"slices"
	"sync"
)

// exactLRU is the reference for hit ratios: the least recently used key goes, by one
// order of all reads and writes. It is not meant to be fast.
//
// A read of a chain is a read of each leading block that a pod holds, and a write one
// of each block, in one of two orders:
//   - head first, as readers walk: the tail is then the most recent, and eviction eats
//     a chain from its head;
//   - tail first: eviction eats a chain from its tail, and what is left of it is usable.
type exactLRU struct {
	names     *podNames
	tailFirst bool
	mu        sync.Mutex
	table     lruTable
}

func newExactLRU(capacity, podsPerKey int) (Index, error) {
	table, err := newLRUTable(capacity, podsPerKey)
	return &exactLRU{names: newPodNames(), table: table}, err
}

func newExactLRUTailFirst(capacity, podsPerKey int) (Index, error) {
	table, err := newLRUTable(capacity, podsPerKey)
	return &exactLRU{names: newPodNames(), table: table, tailFirst: true}, err
}

// each calls do for the keys of a chain in the order of the index.
func (x *exactLRU) each(chain []uint64, do func(key uint64)) {
	keys := slices.All(chain)
	if x.tailFirst {
		keys = slices.Backward(chain)
	}
	for _, key := range keys {
		do(key)
	}
}

func (x *exactLRU) Add(chain []uint64, pod string) {
	id := x.names.id(pod)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.each(chain, func(key uint64) { x.table.add(key, id) })
}

func (x *exactLRU) Evict(key uint64, pod string) {
	id := x.names.id(pod)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.table.evict(key, id)
}

func (x *exactLRU) Len() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.table.keys.Len()
}

func (x *exactLRU) NewReader() Reader { return &exactLRUReader{x, walk{names: x.names}} }

type exactLRUReader struct {
	index *exactLRU
	walk
}

func (r *exactLRUReader) Lookup(chain []uint64) {
	r.index.mu.Lock()
	defer r.index.mu.Unlock()
	r.begin()
	for _, key := range chain {
		pods, ok := r.index.table.keys.Peek(key)
		if !ok || !r.next(pods) {
			break
		}
	}
	r.end()
	r.index.each(chain[:r.Prefix()], func(key uint64) { r.index.table.keys.Get(key) })
}
