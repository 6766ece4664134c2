// SPDX-License-Identifier: Apache-2.0

package design

import (
	"slices"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

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
