// SPDX-License-Identifier: Apache-2.0

// Package kvindex tells which pods hold which KV-cache blocks.
//
// It is the lookup on the request path of a prefix-aware router: keys are block
// hashes, a prompt is a chain of keys, and the router asks how many leading blocks of
// the chain each pod holds. Reads wait for no lock; writers take turns. A read that
// finds a chain in many pieces joins up to 512 keys of it, unless a writer is at work: it
// takes longer, and writers wait for it. The index holds at most a fixed number of keys and drops
// those least recently added or read, a chain from its tail.
package kvindex

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// Config bounds an Index.
type Config struct {
	// Capacity is the number of keys held at most.
	Capacity int
	// MaxPodsPerKey is the number of pods held at most for one key.
	MaxPodsPerKey int
}

// maxCapacity keeps the number of pod sets, at most one a key and one in the making,
// within the 32 bits of a set's index.
const maxCapacity = 1<<32 - 3

// An Index maps keys to sets of pods of type P. Its methods may be called at any time
// from any goroutine.
type Index[P comparable] struct {
	capacity int
	maxPods  int
	keys     keyTable
	sets     setTable[P]
	runs     runTable[P]
	epoch    atomic.Uint64
	live     atomic.Int64

	mu      sync.Mutex // writers take turns; it guards what follows
	intern  interner[P]
	queue   recency
	union   []podID
	evicted func(pods []P)
}

// New returns an empty Index. Its memory grows with what it holds, not with what it
// may hold. It is an error if one of the bounds is not positive, or the capacity is
// beyond 2^32 - 3.
func New[P comparable](config Config) (*Index[P], error) {
	if config.Capacity < 1 || config.Capacity > maxCapacity {
		return nil, fmt.Errorf("kvindex: capacity %d is not between 1 and %d", config.Capacity, maxCapacity)
	}
	if config.MaxPodsPerKey < 1 {
		return nil, fmt.Errorf("kvindex: %d pods per key, at least 1 is needed", config.MaxPodsPerKey)
	}
	x := &Index[P]{
		capacity: config.Capacity,
		maxPods:  config.MaxPodsPerKey,
		keys:     newKeyTable(config.Capacity),
	}
	x.intern.init(&x.sets)
	x.runs.init()
	x.queue.init(config.Capacity)
	return x, nil
}

// OnEvict has f called with the pods of each key that is dropped for lack of room, which
// must not be changed. It is called by the writer that needs the room, so it must not use
// the index. OnEvict itself must be called before all other methods.
func (x *Index[P]) OnEvict(f func(pods []P)) { x.evicted = f }

// Len returns the number of keys held.
func (x *Index[P]) Len() int { return int(x.live.Load()) }

// Add notes that pods hold the blocks of a chain of keys, given head first. If a key
// has more pods than are allowed, those that added nothing for longest are dropped.
func (x *Index[P]) Add(chain []uint64, pods ...P) {
	if len(pods) == 0 {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	ids := x.intern.touch(pods)
	// Tail first: eviction then eats a chain from its tail, and what is left is usable.
	pieces := 0
	var next place
	for _, key := range slices.Backward(chain) {
		p := x.add(key, ids)
		if !p.before(next) {
			pieces++
		}
		next = p
	}
	x.intern.untouch(ids)
	if fragmented(len(chain), pieces) {
		x.link(chain)
	}
	x.settle()
}

// add adds pods to one key, and returns its place in a run.
func (x *Index[P]) add(key uint64, ids []podID) place {
	s, hash := x.keys.shard(key)
	t := s.table.Load()
	if i, w := t.find(hash, key); w.held() {
		x.replace(t, i, x.merged(x.setOf(w).ids, ids))
		return t.place(i)
	}
	if x.Len() == x.capacity {
		x.evictOldest()
	}
	if x.queue.crowded() {
		x.tidy()
	}
	set := x.intern.acquire(x.merged(nil, ids))
	epoch := x.queue.admit(key)
	s.insert(x.keys.hasher, hash, key, set.word(epoch), placed(0, 0, uint16(epoch)))
	x.epoch.Store(x.queue.epoch)
	x.live.Add(1)
	return 0
}

// Evict notes that pods no longer hold the block of a key. It returns whether the index
// still holds the key, for other pods.
func (x *Index[P]) Evict(key uint64, pods ...P) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	s, hash := x.keys.shard(key)
	t := s.table.Load()
	i, w := t.find(hash, key)
	if !w.held() {
		return false
	}
	defer x.settle()
	return x.withdraw(s, i, func(pod P) bool { return slices.Contains(pods, pod) })
}

// Clear notes that a pod holds nothing any more. It visits every key, and lets other
// writers take their turns in between.
func (x *Index[P]) Clear(pod P) {
	x.ClearFunc(func(p P) bool { return p == pod })
}

// ClearFunc is Clear for all pods that gone reports.
func (x *Index[P]) ClearFunc(gone func(P) bool) {
	// Run by run, the keys are in order, and their sets change together.
	for index := uint32(1); x.clearRun(index, gone); index++ {
	}
	for n := range x.keys.shards {
		x.clearShard(&x.keys.shards[n], gone)
	}
}

// clearRun is ClearFunc for the keys of a run. It returns false past the last of them.
func (x *Index[P]) clearRun(index uint32, gone func(P) bool) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if index >= x.runs.unused {
		return false
	}
	r := x.runs.at(index).Load()
	if r == nil {
		return true
	}
	begin := 0
	for _, segment := range *r.segments.Load() {
		if segment.set != nil && slices.ContainsFunc(segment.set.pods, gone) {
			for _, key := range r.keys[begin:segment.end] {
				s, hash := x.keys.shard(key)
				i, _ := s.table.Load().find(hash, key)
				x.withdraw(s, i, gone)
			}
		}
		begin = segment.end
	}
	x.settle()
	return true
}

// clearShard is ClearFunc for the keys of a shard.
func (x *Index[P]) clearShard(s *shard, gone func(P) bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	t := s.table.Load()
	for i := range t.slots {
		if word(t.slots[i].word.Load()).held() {
			x.withdraw(s, i, gone)
		}
	}
	x.settle()
}

// withdraw takes pods from the set of a slot's key, and returns whether any is left. The
// key goes with the last of them.
func (x *Index[P]) withdraw(s *shard, i int, gone func(P) bool) bool {
	t := s.table.Load()
	set := x.setOf(word(t.slots[i].word.Load()))
	left := x.union[:0]
	for n, pod := range set.pods {
		if !gone(pod) {
			left = append(left, set.ids[n])
		}
	}
	x.union = left
	if len(left) == 0 {
		x.remove(s, i)
	} else if len(left) < len(set.pods) {
		x.replace(t, i, left)
	}
	return len(left) > 0
}

// replace gives the key of a slot another set, and counts it as read.
func (x *Index[P]) replace(t *table, i int, ids []podID) {
	old := x.setOf(word(t.slots[i].word.Load()))
	set := old
	if !slices.Equal(ids, old.ids) {
		set = x.intern.acquire(ids)
		x.setChanged(t, i, set)
		defer x.intern.release(old)
	}
	t.slots[i].word.Store(uint64(set.word(x.queue.epoch)))
}

// remove takes the key of a slot out of the index.
func (x *Index[P]) remove(s *shard, i int) {
	t := s.table.Load()
	set := x.setOf(word(t.slots[i].word.Load()))
	x.leave(t, i)
	s.bury(t, i)
	x.live.Add(-1)
	x.intern.release(set)
}

// merged returns the ids of both lists, ascending, cut to the pods allowed for a key.
// It is valid until the next call.
func (x *Index[P]) merged(old, more []podID) []podID {
	ids := append(x.union[:0], old...)
	for _, id := range more {
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	for len(ids) > x.maxPods {
		n := x.intern.longestSilent(ids)
		ids = slices.Delete(ids, n, n+1)
	}
	slices.Sort(ids)
	x.union = ids
	return ids
}

// setOf returns the set of a held word that no other writer can change.
func (x *Index[P]) setOf(w word) *podSet[P] {
	return x.sets.at(w.index()).Load()
}
