// SPDX-License-Identifier: Apache-2.0

package design

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
)

// A podScore is how many leading blocks of a chain a pod holds.
type podScore struct {
	pod    string
	blocks int
}

// A walk scores the pods of a chain in one pass over its blocks, with one step for each
// pod of a block, and allocates nothing once its buffers have grown. It is what a
// router makes of a lookup; designs that use it never build a map. The pods of a block
// are looked at within next only, so next may be called under a lock.
type walk struct {
	names   *podNames
	scores  []podScore
	running []podID  // pods that hold all blocks so far
	blocks  uint64   // so far
	start   uint64   // where the stamps of this walk begin
	stamps  []uint64 // by pod: start plus how many leading blocks it holds
}

// begin forgets the last walk: its stamps are at most start, those of this one above.
func (w *walk) begin() {
	w.start += w.blocks
	w.blocks = 0
	w.running = w.running[:0]
	w.scores = w.scores[:0]
}

// next takes the pods of the chain's next block, and reports whether any of them holds
// all blocks so far. If none does, the walk is over.
func (w *walk) next(pods []podID) bool {
	if w.blocks == 0 {
		return w.first(pods)
	}
	held := w.start + w.blocks
	still := 0
	for _, id := range pods {
		if int(id) < len(w.stamps) && w.stamps[id] == held {
			w.stamps[id]++
			still++
		}
	}
	if still < len(w.running) {
		w.drop(held)
	}
	if still == 0 {
		return false
	}
	w.blocks++
	return true
}

func (w *walk) first(pods []podID) bool {
	for _, id := range pods {
		for int(id) >= len(w.stamps) {
			w.stamps = append(w.stamps, 0)
		}
		w.stamps[id] = w.start + 1
	}
	w.running = append(w.running, pods...)
	if len(pods) > 0 {
		w.blocks = 1
	}
	return len(pods) > 0
}

// drop scores the pods that have not got beyond a stamp.
func (w *walk) drop(stamp uint64) {
	left := w.running[:0]
	for _, id := range w.running {
		if w.stamps[id] > stamp {
			left = append(left, id)
		} else {
			w.score(id)
		}
	}
	w.running = left
}

// end scores the pods that hold all blocks.
func (w *walk) end() {
	for _, id := range w.running {
		w.score(id)
	}
}

func (w *walk) score(id podID) {
	w.scores = append(w.scores, podScore{(*w.names.names.Load())[id], int(w.blocks)})
}

// Prefix returns how many leading blocks the best pod held.
func (w *walk) Prefix() int { return int(w.blocks) }

// A podID is a pod's number: four bytes to store and one comparison, where a name
// takes sixteen and a call.
type podID uint32

// podNames numbers pods, for designs that have no such table of their own. A number is
// never let go of, as the pods of a trial are few.
type podNames struct {
	mu    sync.Mutex                       // for new pods
	ids   atomic.Pointer[map[string]podID] // copied when a pod is new
	names atomic.Pointer[[]string]         // by id
}

func newPodNames() *podNames {
	n := new(podNames)
	n.ids.Store(&map[string]podID{})
	n.names.Store(&[]string{})
	return n
}

// id returns the number of a pod, which may be new.
func (n *podNames) id(pod string) podID {
	if id, ok := (*n.ids.Load())[pod]; ok {
		return id
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if id, ok := (*n.ids.Load())[pod]; ok {
		return id
	}
	names := append(slices.Clone(*n.names.Load()), pod)
	ids := maps.Clone(*n.ids.Load())
	id := podID(len(ids))
	ids[pod] = id
	n.names.Store(&names) // first: whoever knows the number may ask for the name
	n.ids.Store(&ids)
	return id
}

// touched returns a set, the pod added last at its end, after one more is added. A pod
// beyond limit displaces the one added longest ago, as upstream has it. The set is
// changed in place: the caller must have excluded readers.
func touched(set []podID, id podID, limit int) []podID {
	i := slices.Index(set, id)
	if i < 0 && len(set) < limit {
		return append(set, id)
	}
	i = max(i, 0)
	copy(set[i:], set[i+1:])
	set[len(set)-1] = id
	return set
}
