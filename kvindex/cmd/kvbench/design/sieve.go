// SPDX-License-Identifier: Apache-2.0

package design

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/puzpuzpuz/xsync/v4"
)

// sieve is what one gets from parts known to be fast: a concurrent map whose readers
// take no lock, and SIEVE for eviction (Zhang et al., NSDI'24), where a read sets a bit
// and moves nothing. Pod sets are copied when they change.
type sieve struct {
	names      *podNames
	keys       *xsync.Map[uint64, *sieveEntry]
	podsPerKey int
	capacity   int

	mu   sync.Mutex // writers take turns; it guards what follows
	ring sieveEntry // its next is the newest key, its prev the oldest
	hand *sieveEntry
	live int
}

// A sieveEntry is a key in the order of admission, which a read does not change.
type sieveEntry struct {
	key        uint64
	pods       atomic.Pointer[[]podID]
	visited    atomic.Bool
	prev, next *sieveEntry // prev is newer; writers only
}

func newSieve(capacity, podsPerKey int) (Index, error) {
	x := &sieve{
		names:      newPodNames(),
		keys:       xsync.NewMap[uint64, *sieveEntry](),
		podsPerKey: podsPerKey,
		capacity:   capacity,
	}
	x.ring.prev, x.ring.next = &x.ring, &x.ring
	x.hand = &x.ring
	return x, nil
}

// visit marks an entry as read, and writes to it only if that is news.
func (e *sieveEntry) visit() {
	if !e.visited.Load() {
		e.visited.Store(true)
	}
}

// Add admits the tail first: of keys that are read alike, the tail then goes first.
func (x *sieve) Add(chain []uint64, pod string) {
	id := x.names.id(pod)
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, key := range slices.Backward(chain) {
		x.add(key, id)
	}
}

func (x *sieve) add(key uint64, id podID) {
	if e, ok := x.keys.Load(key); ok {
		e.visit()
		if old := *e.pods.Load(); !slices.Contains(old, id) {
			set := joined(old, id, x.podsPerKey)
			e.pods.Store(&set)
		}
		return
	}
	if x.live == x.capacity {
		x.evictOne()
	}
	e := &sieveEntry{key: key, prev: &x.ring, next: x.ring.next}
	e.pods.Store(&[]podID{id})
	e.prev.next, e.next.prev = e, e
	x.live++
	x.keys.Store(key, e)
}

// evictOne moves the hand from old to new, past visited keys, which it gives another
// round, and removes the first that was not visited.
func (x *sieve) evictOne() {
	for {
		e := x.hand
		if e == &x.ring {
			x.hand = x.ring.prev
			continue
		}
		if !e.visited.Load() {
			x.remove(e)
			return
		}
		e.visited.Store(false)
		x.hand = e.prev
	}
}

func (x *sieve) remove(e *sieveEntry) {
	if x.hand == e {
		x.hand = e.prev
	}
	e.prev.next, e.next.prev = e.next, e.prev
	x.live--
	x.keys.Delete(e.key)
}

func (x *sieve) Evict(key uint64, pod string) {
	id := x.names.id(pod)
	x.mu.Lock()
	defer x.mu.Unlock()
	e, ok := x.keys.Load(key)
	if !ok {
		return
	}
	set := parted(*e.pods.Load(), id)
	if len(set) == 0 {
		x.remove(e)
		return
	}
	e.pods.Store(&set)
}

func (x *sieve) Len() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.live
}

func (x *sieve) NewReader() Reader { return &sieveReader{x, walk{names: x.names}} }

type sieveReader struct {
	index *sieve
	walk
}

func (r *sieveReader) Lookup(chain []uint64) {
	r.begin()
	for _, key := range chain {
		e, ok := r.index.keys.Load(key)
		if !ok {
			break
		}
		e.visit()
		if !r.next(*e.pods.Load()) {
			break
		}
	}
	r.end()
}
