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

// Score returns how many leading blocks of a chain each pod holds, for the pods that
// hold the first, in no particular order. The result is put into scores, from its
// start; nothing is allocated if it has room for the pods of a key.
func (x *Index[P]) Score(chain []uint64, scores []PodScore[P]) []PodScore[P] {
	scores = scores[:0]
	running := 0 // scores[:running] are those of pods that hold all blocks so far
	epoch := x.epoch.Load()
	last := noSet
	var words [batch]word
	for n, key := range chain {
		if n%batch == 0 {
			x.keys.readAll(chain[n:min(n+batch, len(chain))], epoch, &words)
		}
		w := words[n%batch]
		if w.set() == last {
			continue
		}
		set := x.podsOf(key, w)
		if set == nil {
			return finish(scores, running, n)
		}
		last = set.word(0).set()
		if n == 0 {
			scores = begin(scores, set)
			running = len(scores)
			continue
		}
		if running = narrow(scores[:running], set.ids, n); running == 0 {
			return scores
		}
	}
	return finish(scores, running, len(chain))
}

func begin[P comparable](scores []PodScore[P], set *podSet[P]) []PodScore[P] {
	for i, pod := range set.pods {
		scores = append(scores, PodScore[P]{Pod: pod, id: set.ids[i]})
	}
	return scores
}

// narrow moves the pods that are among ids to the front, scores the others with n blocks,
// and returns how many are in front. Both lists are ascending, and the front stays so.
func narrow[P comparable](scores []PodScore[P], ids []podID, n int) int {
	kept, at := 0, 0
	for i := range scores {
		for at < len(ids) && ids[at] < scores[i].id {
			at++
		}
		if at == len(ids) || ids[at] != scores[i].id {
			scores[i].Blocks = n
			continue
		}
		if kept < i {
			scores[kept], scores[i] = scores[i], scores[kept]
		}
		kept++
	}
	return kept
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
		var words [batch]word
		var kept []P
		for n, key := range chain {
			if n%batch == 0 {
				x.keys.readAll(chain[n:min(n+batch, len(chain))], epoch, &words)
			}
			set := x.podsOf(key, words[n%batch])
			if set == nil {
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

// Holds returns whether a pod holds the block of a key. It does not count as a read.
func (x *Index[P]) Holds(key uint64, pod P) bool {
	s, hash := x.keys.shard(key)
	t := s.table.Load()
	_, w := t.find(t.home(hash), key)
	set := x.podsOf(key, w)
	return set != nil && slices.Contains(set.pods, pod)
}

// All yields every key and its pods, which must not be changed, in no particular order.
// What is written meanwhile is seen or is not.
func (x *Index[P]) All() iter.Seq2[uint64, []P] {
	return func(yield func(uint64, []P) bool) {
		for n := range x.keys.shards {
			t := x.keys.shards[n].table.Load()
			for i := range t.slots {
				w := word(t.slots[i].word.Load())
				key := t.slots[i].key.Load()
				if set := x.podsOf(key, w); set != nil && !yield(key, set.pods) {
					return
				}
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

// podsOf returns the set of a key whose word was read, or nil if the key is not held.
func (x *Index[P]) podsOf(key uint64, w word) *podSet[P] {
	for w.held() {
		if set := x.sets.get(w); set != nil {
			return set
		}
		// The key was changed since its word was read, maybe in another table.
		s, hash := x.keys.shard(key)
		t := s.table.Load()
		_, w = t.find(t.home(hash), key)
	}
	return nil
}
