// SPDX-License-Identifier: Apache-2.0

package design

import "sync"

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
