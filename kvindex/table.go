// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"math/bits"
	"math/rand/v2"
	"sync/atomic"
)

// A word is what a slot says of its key: the pods that hold it, as the index (32 bits)
// and generation (16) of a pod set, and the epoch (low 16 bits) it was last added or
// read in. The zero word is a slot never used.
type word uint64

// buried is the word of a slot whose key was removed. The key stays, so that readers
// on their way along a probe sequence do not lose it.
const buried word = 1

func (w word) index() uint32 { return uint32(w >> 32) }
func (w word) gen() uint16   { return uint16(w >> 16) }
func (w word) held() bool    { return w.index() != 0 }

// set identifies the pod set: equal words without their epochs.
func (w word) set() uint64 { return uint64(w) >> 16 }

// epochNear returns the epoch of the word, at most 65,535 before now.
func (w word) epochNear(now uint64) uint64 { return now - uint64(uint16(now)-uint16(w)) }

// readIn returns the word as read in an epoch, and whether that is later than it was.
func (w word) readIn(epoch uint64) (word, bool) {
	return w&^0xffff | word(uint16(epoch)), int16(uint16(epoch)-uint16(w)) > 0
}

// A slot's key never changes while its table is in use, so a reader that finds the key
// has to read nothing but the word, and needs no lock to do so.
type slot struct {
	key  atomic.Uint64
	word atomic.Uint64
}

// slotsPerGroup is how many slots a cache line has.
const slotsPerGroup = 4

// A table is open-addressed with linear probing, from a cache line's first slot on.
// Readers see it as long as they hold it; a writer that needs room publishes another one
// and leaves this one to the garbage collector.
type table struct {
	slots  []slot
	places []atomic.Uint64 // of the slots' keys
}

func newTable(slots int) *table {
	return &table{make([]slot, slots), make([]atomic.Uint64, slots)}
}

// keysPerShard bounds the pause in which a writer copies one shard into another table.
const keysPerShard = 1 << 14

// A table is filled to targetLoad when it is made, and to maxLoad before it is copied.
const (
	targetLoad = 0.55
	maxLoad    = 0.75
)

// emptyTable is every shard's first: no slot of it may be used.
var emptyTable = newTable(slotsPerGroup)

// A shard is one part of the keys. live and used belong to the writers.
type shard struct {
	table atomic.Pointer[table]
	live  int // slots that are held
	used  int // slots that are held or buried
}

// A keyTable is all shards. Each key belongs to one of them.
type keyTable struct {
	hasher
	shards []shard
}

// A hasher spreads keys over shards, and over the slots of one.
type hasher struct {
	seed  uint64
	parts uint64
}

func newKeyTable(capacity int) keyTable {
	shards := make([]shard, (capacity+keysPerShard-1)/keysPerShard)
	for i := range shards {
		shards[i].table.Store(emptyTable)
	}
	return keyTable{hasher{rand.Uint64(), uint64(len(shards))}, shards}
}

// split returns a key's shard, and its hash within the shard.
func (h hasher) split(key uint64) (shard, hash uint64) {
	high, low := bits.Mul64(key^h.seed, 0x9E3779B97F4A7C15)
	high ^= low
	high, low = bits.Mul64(high*0xD6E8FEB86659FD93, h.parts)
	return high, low
}

// shard returns the shard of a key and the key's hash in it.
func (k *keyTable) shard(key uint64) (*shard, uint64) {
	n, hash := k.split(key)
	return &k.shards[n], hash
}

// find returns where a key is and its word, which is not held if the key is not.
func (k *keyTable) find(key uint64) (*table, int, word) {
	s, hash := k.shard(key)
	t := s.table.Load()
	i, w := t.find(hash, key)
	return t, i, w
}

// read marks the slot as read in an epoch if its word is still the same.
func (s *slot) read(w word, epoch uint64) {
	if read, later := w.readIn(epoch); later {
		// If another goroutine was faster, it has done as much.
		s.word.CompareAndSwap(uint64(w), uint64(read))
	}
}

// home is where the probe sequence of a hash begins: with a group.
func (t *table) home(hash uint64) int {
	home, _ := bits.Mul64(hash, uint64(len(t.slots)))
	return int(home &^ (slotsPerGroup - 1))
}

func (t *table) place(i int) place       { return place(t.places[i].Load()) }
func (t *table) setPlace(i int, p place) { t.places[i].Store(uint64(p)) }

// setQueued notes in which epoch's queue the key of a slot is.
func (t *table) setQueued(i int, epoch uint64) {
	p := t.place(i)
	t.setPlace(i, placed(p.run(), p.offset(), uint16(epoch)))
}

// find returns the slot of a key, held or buried, or -1.
func (t *table) find(hash, key uint64) (int, word) {
	for i := t.home(hash); ; {
		w := word(t.slots[i].word.Load())
		if w == 0 {
			return -1, 0
		}
		if t.slots[i].key.Load() == key {
			return i, w
		}
		if i++; i == len(t.slots) {
			i = 0
		}
	}
}

// put adds a key that the table does not have.
func (t *table) put(hash, key uint64, w word, p place) {
	i := t.home(hash)
	for t.slots[i].word.Load() != 0 {
		if i++; i == len(t.slots) {
			i = 0
		}
	}
	t.setPlace(i, p)
	t.slots[i].key.Store(key)
	t.slots[i].word.Store(uint64(w)) // last: it makes the key visible
}

// insert adds a key that is not held.
func (s *shard) insert(h hasher, hash, key uint64, w word, p place) {
	t := s.table.Load()
	if i, _ := t.find(hash, key); i >= 0 {
		t.setPlace(i, p)
		t.slots[i].word.Store(uint64(w))
		s.live++
		return
	}
	if t == emptyTable || float64(s.used+1) > maxLoad*float64(len(t.slots)) {
		t = s.rebuild(h, t)
	}
	t.put(hash, key, w, p)
	s.live++
	s.used++
}

// rebuild publishes a copy of a table without its buried slots, of the size that one
// more key wants. What readers mark in the old one meanwhile is lost, until they read
// the key again.
func (s *shard) rebuild(h hasher, old *table) *table {
	groups := int(float64(s.live+1)/targetLoad)/slotsPerGroup + 1
	t := newTable(groups * slotsPerGroup)
	for i := range old.slots {
		if w := word(old.slots[i].word.Load()); w.held() {
			key := old.slots[i].key.Load()
			_, hash := h.split(key)
			t.put(hash, key, w, old.place(i))
		}
	}
	s.used = s.live
	s.table.Store(t)
	return t
}

// bury removes the key of a held slot.
func (s *shard) bury(t *table, i int) {
	t.slots[i].word.Store(uint64(buried))
	s.live--
	if s.live == 0 { // gives the memory back
		s.table.Store(emptyTable)
		s.used = 0
	}
}
