// SPDX-License-Identifier: Apache-2.0

package design

import (
	"slices"
	"sync"
)

// maxShards is how many parts the keys are spread over, if there are as many.
const maxShards = 64

// sharded spreads the keys over tables with a lock each, so that readers wait for each
// other less. Each table evicts by itself: the order of a chain's keys is lost.
type sharded struct {
	names  *podNames
	shards []lockedTable
}

// A lockedTable fills a cache line, so that no lock shares one with another.
type lockedTable struct {
	mu    sync.Mutex
	table lruTable
	_     [40]byte
}

func newSharded(capacity, podsPerKey int) (Index, error) {
	x := &sharded{newPodNames(), make([]lockedTable, min(capacity, maxShards))}
	for i := range x.shards {
		// The shares add up to the capacity.
		share := capacity*(i+1)/len(x.shards) - capacity*i/len(x.shards)
		table, err := newLRUTable(share, podsPerKey)
		if err != nil {
			return nil, err
		}
		x.shards[i].table = table
	}
	return x, nil
}

func (x *sharded) shard(key uint64) *lockedTable {
	hash := key * 0x9E3779B97F4A7C15 >> 32
	return &x.shards[hash*uint64(len(x.shards))>>32]
}

// Add admits the tail first: of keys that are read alike, the tail then goes first.
func (x *sharded) Add(chain []uint64, pod string) {
	id := x.names.id(pod)
	for _, key := range slices.Backward(chain) {
		s := x.shard(key)
		s.mu.Lock()
		s.table.add(key, id)
		s.mu.Unlock()
	}
}

func (x *sharded) Evict(key uint64, pod string) {
	id := x.names.id(pod)
	s := x.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table.evict(key, id)
}

func (x *sharded) Len() int {
	n := 0
	for i := range x.shards {
		s := &x.shards[i]
		s.mu.Lock()
		n += s.table.keys.Len()
		s.mu.Unlock()
	}
	return n
}

func (x *sharded) NewReader() Reader { return &shardedReader{x, walk{names: x.names}} }

type shardedReader struct {
	index *sharded
	walk
}

func (r *shardedReader) Lookup(chain []uint64) {
	r.begin()
	for _, key := range chain {
		s := r.index.shard(key)
		s.mu.Lock()
		pods, ok := s.table.keys.Get(key)
		more := ok && r.next(pods)
		s.mu.Unlock()
		if !more {
			break
		}
	}
	r.end()
}
