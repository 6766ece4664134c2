// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"iter"
	"slices"
)

// PodScore is how many leading blocks of a chain a pod holds.
type PodScore[P comparable] struct {
	Pod    P
	Blocks int
	id     podID
}

// ahead is for how many keys the memory is asked for before the first is looked at, so
// that their cache misses overlap.
const ahead = 16

// A place is where the search for a key begins.
type place struct {
	table *table
	home  int
}

// Score returns how many leading blocks of a chain each pod holds, for the pods that
// hold the first, in no particular order. The result is put into scores, from its
// start; nothing is allocated if it has room for the pods of a key.
func (x *Index[P]) Score(chain []uint64, scores []PodScore[P]) []PodScore[P] {
	scores = scores[:0]
	epoch := x.epoch.Load()
	running := 0 // scores[:running] are those of pods that hold all blocks so far
	last := uint64(0)
	var places [ahead]place
	for n, key := range chain {
		if n%ahead == 0 {
			x.seek(chain[n:min(n+ahead, len(chain))], &places)
		}
		w, set := x.read(places[n%ahead], key, epoch, last)
		if !w.held() {
			return finish(scores, running, n)
		}
		if set == nil {
			continue // the same set as the block before
		}
		last = w.set()
		if n == 0 {
			for i, pod := range set.pods {
				scores = append(scores, PodScore[P]{Pod: pod, id: set.ids[i]})
			}
			running = len(scores)
			continue
		}
		for i := 0; i < running; {
			if _, ok := slices.BinarySearch(set.ids, scores[i].id); ok {
				i++
				continue
			}
			running--
			scores[i].Blocks = n
			scores[i], scores[running] = scores[running], scores[i]
		}
		if running == 0 {
			return scores
		}
	}
	return finish(scores, running, len(chain))
}

// finish scores the pods that hold all blocks before the n-th.
func finish[P comparable](scores []PodScore[P], running, n int) []PodScore[P] {
	for i := range running {
		scores[i].Blocks = n
	}
	return scores
}

// Lookup yields, for each key of a chain that the index holds, its position in the chain
// and those of its pods that keep wants; all of them if keep is nil. A key with none of
// them is passed over. The pods must not be changed; what keep left is valid in that step
// only.
func (x *Index[P]) Lookup(chain []uint64, keep func(P) bool) iter.Seq2[int, []P] {
	return func(yield func(int, []P) bool) {
		epoch := x.epoch.Load()
		var places [ahead]place
		var kept []P
		for n, key := range chain {
			if n%ahead == 0 {
				x.seek(chain[n:min(n+ahead, len(chain))], &places)
			}
			w, set := x.read(places[n%ahead], key, epoch, 0)
			if !w.held() {
				continue
			}
			pods := set.pods
			if keep != nil {
				kept = filter(kept[:0], pods, keep)
				pods = kept
			}
			if len(pods) > 0 && !yield(n, pods) {
				return
			}
		}
	}
}

func filter[P any](kept, pods []P, keep func(P) bool) []P {
	for _, pod := range pods {
		if keep(pod) {
			kept = append(kept, pod)
		}
	}
	return kept
}

// seek finds where the search for some keys begins, and loads the memory there.
func (x *Index[P]) seek(keys []uint64, places *[ahead]place) {
	for i, key := range keys {
		s, hash := x.shard(key)
		t := s.table.Load()
		home := t.home(hash)
		t.slots[home].word.Load()
		places[i] = place{t, home}
	}
}

// read returns the word and the set of a key, and marks the key as read in an epoch.
// The word is zero, or buried, if the index does not hold the key. The set is nil if
// it is the last one again.
func (x *Index[P]) read(at place, key, epoch, last uint64) (word, *podSet[P]) {
	for {
		i, w := at.table.find(at.home, key)
		if !w.held() {
			return 0, nil
		}
		if read, later := w.readIn(epoch); later {
			// If another goroutine was faster, it has done as much.
			at.table.slots[i].word.CompareAndSwap(uint64(w), uint64(read))
		}
		if w.set() == last {
			return w, nil
		}
		if set := x.sets.get(w); set != nil {
			return w, set
		}
		// The key was changed between the two loads, maybe in another table.
		s, hash := x.shard(key)
		at.table = s.table.Load()
		at.home = at.table.home(hash)
	}
}
