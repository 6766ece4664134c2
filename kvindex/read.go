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
	walk := x.walk(chain)
	var last *podSet[P]
	running := 0 // scores[:running] are those of pods that hold all blocks so far
	n := 0
	for n < len(chain) {
		set, keys := walk.next()
		if set == nil {
			break
		}
		if n == 0 {
			scores = begin(scores, set)
			running = len(scores)
		} else if set != last {
			running = narrow(scores[:running], set.ids, n)
		}
		if running == 0 {
			break
		}
		last = set
		n += keys
	}
	for i := range running {
		scores[i].Blocks = n
	}
	walk.finish(chain)
	return scores
}

// A walk finds the pods of a chain, key after key.
type walk[P comparable] struct {
	x        *Index[P]
	epoch    uint64
	chain    []uint64 // what is left of it
	run      *run[P]  // has the next keys, from offset up to end
	segments []segment[P]
	offset   int
	end      int
	leading  int  // keys that were held before the first that was not
	pieces   int  // in which they were found
	broken   bool // one was not held
}

func (x *Index[P]) walk(chain []uint64) walk[P] {
	return walk[P]{x: x, epoch: x.epoch.Load(), chain: chain}
}

// next returns the pods of the next key, nil if it is not held, and how many keys from
// there on have just these pods. They count as read.
func (w *walk[P]) next() (*podSet[P], int) {
	if w.offset == w.end {
		if set := w.find(); w.offset == w.end {
			w.chain = w.chain[1:]
			w.count(set, 1)
			return set, 1
		}
	}
	segment := w.segments[0]
	w.segments = w.segments[1:]
	end := min(segment.end, w.end)
	n := end - w.offset
	w.run.read(w.offset, end, w.epoch)
	w.offset = end
	w.chain = w.chain[n:]
	w.count(segment.set, n)
	return segment.set, n
}

// count notes how many keys have a set.
func (w *walk[P]) count(set *podSet[P], keys int) {
	if w.broken = w.broken || set == nil; !w.broken {
		w.leading += keys
	}
}

// finish links a chain of which the walk found the leading keys in many pieces.
func (w *walk[P]) finish(chain []uint64) {
	if fragmented(w.leading, w.pieces) {
		w.x.relink(chain[:w.leading])
	}
}

// find finds the next keys in a run, or the pods of the next one.
func (w *walk[P]) find() *podSet[P] {
	key := w.chain[0]
	t, i, word := w.x.keys.find(key)
	if !word.held() {
		return nil
	}
	if !w.broken {
		w.pieces++
	}
	if p := t.place(i); p.run() != 0 {
		if r := w.x.runs.at(p.run()).Load(); r != nil {
			if segments, n := r.find(w.chain, p.offset()); n > 0 {
				w.run, w.segments = r, segments
				w.offset, w.end = p.offset(), p.offset()+n
				return nil
			}
		}
	}
	t.slots[i].read(word, w.epoch)
	return w.x.podsOf(key, word)
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

// A Stretch is a part of a chain, from Begin to End (without), that the same pods hold.
type Stretch[P comparable] struct {
	Begin, End int
	Pods       []P // must not be changed
}

// Stretches yields what is held of a chain, in order. It counts as read.
func (x *Index[P]) Stretches(chain []uint64) iter.Seq[Stretch[P]] {
	return func(yield func(Stretch[P]) bool) {
		walk := x.walk(chain)
		for n := 0; n < len(chain); {
			set, keys := walk.next()
			if set != nil && !yield(Stretch[P]{n, n + keys, set.pods}) {
				return
			}
			n += keys
		}
		walk.finish(chain)
	}
}

// Lookup yields, for each key of a chain that the index holds, its position in the chain
// and those of its pods that keep wants; all of them if keep is nil. A key with none of
// them is passed over. The pods must not be changed; what keep left is valid in that step
// only.
func (x *Index[P]) Lookup(chain []uint64, keep func(P) bool) iter.Seq2[int, []P] {
	return func(yield func(int, []P) bool) {
		var kept []P
		for stretch := range x.Stretches(chain) {
			pods := stretch.Pods
			if keep != nil {
				kept = filter(kept[:0], pods, keep)
				pods = kept
			}
			for n := stretch.Begin; n < stretch.End; n++ {
				if len(pods) > 0 && !yield(n, pods) {
					return
				}
			}
		}
	}
}

// Holds returns whether a pod holds the block of a key. It does not count as a read.
func (x *Index[P]) Holds(key uint64, pod P) bool {
	_, _, w := x.keys.find(key)
	set := x.podsOf(key, w)
	return set != nil && slices.Contains(set.pods, pod)
}

// Count returns how many keys a pod holds.
func (x *Index[P]) Count(pod P) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	if id, ok := x.intern.ids[pod]; ok {
		return x.intern.pods[id].keys
	}
	return 0
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
		_, _, w = x.keys.find(key)
	}
	return nil
}
