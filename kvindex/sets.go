// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"encoding/binary"
	"slices"
	"sync/atomic"
)

// A podID is a pod's number while any set has it.
type podID uint32

// A podSet is immutable, and the only one with its pods: two keys with the same pods
// have the same set.
type podSet[P comparable] struct {
	index uint32
	gen   uint16
	ids   []podID // ascending
	bits  podBits
	pods  []P // in the order of ids
	refs  int // keys that have it; writers only
}

// podBits are pods, a bit for each number: those of two sets are compared 64 at a time.
// The first 64, which are all that most fleets have, lie beside what else is read of a set.
type podBits struct {
	low  uint64
	high []uint64 // from number 64 on
}

func bitsOf(ids []podID) podBits {
	bits := podBits{high: make([]uint64, ids[len(ids)-1]/64)}
	for _, id := range ids {
		if id < 64 {
			bits.low |= 1 << id
		} else {
			bits.high[id/64-1] |= 1 << (id % 64)
		}
	}
	return bits
}

func (s *podSet[P]) word(epoch uint64) word {
	return word(s.index)<<32 | word(s.gen)<<16 | word(uint16(epoch))
}

const entriesPerChunk = 1 << 10

type chunk[T any] [entriesPerChunk]atomic.Pointer[T]

// A directory is values by index, for readers without a lock.
type directory[T any] struct {
	chunks atomic.Pointer[[]*chunk[T]]
}

func (d *directory[T]) init() { d.chunks.Store(&[]*chunk[T]{new(chunk[T])}) }

func (d *directory[T]) at(index uint32) *atomic.Pointer[T] {
	return &(*d.chunks.Load())[index/entriesPerChunk][index%entriesPerChunk]
}

// grow makes room for the next index, the highest in use.
func (d *directory[T]) grow(index uint32) {
	chunks := *d.chunks.Load()
	if int(index)/entriesPerChunk < len(chunks) {
		return
	}
	// Readers of the old slice do not look past its end.
	more := append(chunks, new(chunk[T]))
	d.chunks.Store(&more)
}

// A setTable is the pod sets by index.
type setTable[P comparable] struct{ directory[podSet[P]] }

// get returns the set of a word, or nil if the set was let go of since the word was
// read. Then the word has changed too, and reading it again helps.
func (t *setTable[P]) get(w word) *podSet[P] {
	set := t.at(w.index()).Load()
	if set == nil || set.gen != w.gen() {
		return nil
	}
	return set
}

// An interner makes and lets go of pod sets and pod numbers. Writers only.
type interner[P comparable] struct {
	table  *setTable[P]
	byIDs  map[string]*podSet[P]
	free   []freeSet
	unused uint32 // the lowest index never used
	key    []byte

	ids     map[P]podID
	pods    []pod[P]
	freePod []podID
	clock   uint64
}

// freeSet is an index to be used again, and by which generation.
type freeSet struct {
	index uint32
	gen   uint16
}

type pod[P comparable] struct {
	pod   P
	added uint64 // when it last added anything, in calls of Add
	uses  int    // by sets, and by the call of Add under way
	keys  int    // that it holds
}

func (n *interner[P]) init(table *setTable[P]) {
	n.table = table
	n.table.init()
	n.byIDs = make(map[string]*podSet[P])
	n.ids = make(map[P]podID)
	n.unused = 1 // index 0 is that of words without a set
}

// touch returns the ids of pods that add something now, and keeps them until untouch.
func (n *interner[P]) touch(pods []P) []podID {
	n.clock++
	ids := make([]podID, 0, len(pods))
	for _, p := range pods {
		id, ok := n.ids[p]
		if !ok {
			id = n.newPod(p)
		}
		if n.pods[id].added < n.clock { // not named twice
			n.pods[id].added = n.clock
			n.pods[id].uses++
			ids = append(ids, id)
		}
	}
	return ids
}

func (n *interner[P]) untouch(ids []podID) {
	for _, id := range ids {
		n.unuse(id)
	}
}

func (n *interner[P]) newPod(p P) podID {
	id := podID(len(n.pods))
	if last := len(n.freePod) - 1; last >= 0 {
		id = n.freePod[last]
		n.freePod = n.freePod[:last]
	} else {
		n.pods = append(n.pods, pod[P]{})
	}
	n.pods[id] = pod[P]{pod: p}
	n.ids[p] = id
	return id
}

// unuse lets go of a pod's number once. A pod without uses is forgotten.
func (n *interner[P]) unuse(id podID) {
	if n.pods[id].uses--; n.pods[id].uses == 0 {
		delete(n.ids, n.pods[id].pod)
		n.pods[id] = pod[P]{}
		n.freePod = append(n.freePod, id)
	}
}

// longestSilent returns the position of the pod whose last Add is the longest ago.
func (n *interner[P]) longestSilent(ids []podID) int {
	oldest := 0
	for i, id := range ids {
		if n.pods[id].added < n.pods[ids[oldest]].added {
			oldest = i
		}
	}
	return oldest
}

// acquire returns the set of the ids, ascending, for one more key.
func (n *interner[P]) acquire(ids []podID) *podSet[P] {
	n.key = n.key[:0]
	for _, id := range ids {
		n.key = binary.LittleEndian.AppendUint32(n.key, uint32(id))
	}
	set, ok := n.byIDs[string(n.key)]
	if !ok {
		set = n.newSet(ids)
		n.byIDs[string(n.key)] = set
	}
	set.refs++
	for _, id := range ids {
		n.pods[id].keys++
	}
	return set
}

func (n *interner[P]) newSet(ids []podID) *podSet[P] {
	set := &podSet[P]{ids: slices.Clone(ids), bits: bitsOf(ids), pods: make([]P, len(ids))}
	for i, id := range ids {
		set.pods[i] = n.pods[id].pod
		n.pods[id].uses++
	}
	if last := len(n.free) - 1; last >= 0 {
		set.index, set.gen = n.free[last].index, n.free[last].gen
		n.free = n.free[:last]
	} else {
		set.index = n.unused
		n.unused++
		n.table.grow(set.index)
	}
	n.table.at(set.index).Store(set)
	return set
}

// release lets go of a set for one key. A set without keys is gone: the generation
// tells readers that still hold its word from those of the next set with its index.
func (n *interner[P]) release(set *podSet[P]) {
	for _, id := range set.ids {
		n.pods[id].keys--
	}
	if set.refs--; set.refs > 0 {
		return
	}
	n.key = n.key[:0]
	for _, id := range set.ids {
		n.key = binary.LittleEndian.AppendUint32(n.key, uint32(id))
		n.unuse(id)
	}
	delete(n.byIDs, string(n.key))
	n.table.at(set.index).Store(nil)
	n.free = append(n.free, freeSet{set.index, set.gen + 1})
}
