// SPDX-License-Identifier: Apache-2.0

package design

import (
	"slices"
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// exactLRU is the reference for hit ratios: the least recently used key goes, by one
// order of all reads and writes. It is not meant to be fast.
// A read of a chain is a read of each leading block that a pod holds, and a write one
// of each block, head first, as readers walk.
type exactLRU struct {
	names *podNames
	mu    sync.Mutex
	table lruTable
}

func newExactLRU(capacity, podsPerKey int) (Index, error) {
	table, err := newLRUTable(capacity, podsPerKey)
	return &exactLRU{names: newPodNames(), table: table}, err
}

func (x *exactLRU) Add(chain []uint64, pod string) {
	id := x.names.id(pod)
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, key := range chain {
		x.table.add(key, id)
	}
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
	for _, key := range chain[:r.Prefix()] {
		r.index.table.keys.Get(key)
	}
}

// An lruTable is the least recently used keys and their pods, for one goroutine at a
// time: golang-lru without its lock, which the designs that are made of it bring.
type lruTable struct {
	keys       *simplelru.LRU[uint64, []podID]
	podsPerKey int
}

func newLRUTable(capacity, podsPerKey int) (lruTable, error) {
	keys, err := simplelru.NewLRU[uint64, []podID](capacity, nil)
	return lruTable{keys, podsPerKey}, err
}

// add makes a key the most recent one.
func (t lruTable) add(key uint64, id podID) {
	old, ok := t.keys.Get(key)
	if set := touched(old, id, t.podsPerKey); !ok || len(set) != len(old) {
		t.keys.Add(key, set)
	}
}

// evict makes a key of which pods are left the most recent one, as upstream has it.
func (t lruTable) evict(key uint64, id podID) {
	set, _ := t.keys.Get(key)
	i := slices.Index(set, id)
	if i < 0 {
		return
	}
	if len(set) == 1 {
		t.keys.Remove(key)
		return
	}
	t.keys.Add(key, slices.Delete(set, i, i+1))
}

// merged is the shape that llm-d's router took with pull request 2680, as strong as we
// can make it: a reader peeks at all keys of a chain under one read lock and scores
// them on the way, then promotes those it found, head to tail, under one exclusive
// lock. So its order is that of one LRU, exact-lru's.
type merged struct {
	names *podNames
	mu    sync.RWMutex
	table lruTable
}

func newMerged(capacity, podsPerKey int) (Index, error) {
	table, err := newLRUTable(capacity, podsPerKey)
	return &merged{names: newPodNames(), table: table}, err
}

func (x *merged) Add(chain []uint64, pod string) {
	id := x.names.id(pod)
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, key := range chain {
		x.table.add(key, id)
	}
}

func (x *merged) Evict(key uint64, pod string) {
	id := x.names.id(pod)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.table.evict(key, id)
}

func (x *merged) Len() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.table.keys.Len()
}

func (x *merged) NewReader() Reader { return &mergedReader{x, walk{names: x.names}} }

type mergedReader struct {
	index *merged
	walk
}

func (r *mergedReader) Lookup(chain []uint64) {
	r.peek(chain)
	if r.Prefix() > 0 {
		r.promote(chain[:r.Prefix()])
	}
}

func (r *mergedReader) peek(chain []uint64) {
	r.index.mu.RLock()
	defer r.index.mu.RUnlock()
	r.begin()
	for _, key := range chain {
		pods, ok := r.index.table.keys.Peek(key)
		if !ok || !r.next(pods) {
			break
		}
	}
	r.end()
}

func (r *mergedReader) promote(prefix []uint64) {
	r.index.mu.Lock()
	defer r.index.mu.Unlock()
	for _, key := range prefix {
		r.index.table.keys.Get(key)
	}
}
