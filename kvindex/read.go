// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"iter"
	"math/bits"
	"slices"
)

// PodScore is how many leading blocks of a chain a pod holds.
type PodScore[P comparable] struct {
	Pod    P
	Blocks int
}

// Score returns how many leading blocks of a chain each pod holds, for the pods that
// hold the first, in no particular order. The result is put into scores, from its
// start; nothing is allocated if it has room for the pods of a key, and no more than
// 1,024 pods hold anything.
func (x *Index[P]) Score(chain []uint64, scores []PodScore[P]) []PodScore[P] {
	scores = scores[:0]
	walk := x.walk(chain)
	var first *podSet[P]
	n := 0
	for len(walk.chain) > 0 {
		part := walk.next()
		if n == 0 {
			if first = part.segments[0].set; first == nil {
				break
			}
			for _, pod := range first.pods {
				scores = append(scores, PodScore[P]{Pod: pod})
			}
		}
		if n += part.pass(first); part.begin < part.end {
			n = walk.scoreRest(part, n, first, scores)
			break
		}
	}
	for i := range scores {
		if scores[i].Blocks == 0 { // it holds all of them
			scores[i].Blocks = n
		}
	}
	walk.finish(chain)
	return scores
}

// scoreRest scores, on what is left of a part and of the chain, the pods of first that do not
// hold all of it, and returns how many blocks the others hold. It is not in Score because
// it takes room on the stack, which few chains need and a new goroutine does not have.
func (w *walk[P]) scoreRest(part part[P], n int, first *podSet[P], scores []PodScore[P]) int {
	var room [1024/64 - 1]uint64
	holding := podBits{first.bits.low, append(room[:0], first.bits.high...)}
	for {
		for part.begin < part.end {
			set := part.segments[0].set
			if set == nil || !narrow(scores, &first.bits, &holding, &set.bits, n) {
				return n
			}
			n += part.pass(set)
		}
		if len(w.chain) == 0 {
			return n
		}
		part = w.next()
	}
}

// narrow scores with n blocks those of the holding pods that are not in a set, and keeps
// the others. It reports whether there are any. The scores are in the order of first.
func narrow[P comparable](scores []PodScore[P], first, holding, set *podBits, n int) bool {
	kept := holding.low & set.low
	scoreGone(scores, first.low, holding.low&^kept, n)
	holding.low = kept
	if len(holding.high) == 0 {
		return kept != 0
	}
	left := kept
	before := bits.OnesCount64(first.low) // pods of first with lower numbers
	for i, word := range holding.high {
		kept := uint64(0)
		if i < len(set.high) {
			kept = word & set.high[i]
		}
		scoreGone(scores[before:], first.high[i], word&^kept, n)
		before += bits.OnesCount64(first.high[i])
		holding.high[i] = kept
		left |= kept
	}
	return left != 0
}

// scoreGone scores with n blocks the gone of 64 pods; the scores are those of all of them.
func scoreGone[P comparable](scores []PodScore[P], all, gone uint64, n int) {
	for ; gone != 0; gone &= gone - 1 {
		scores[bits.OnesCount64(all&(gone&-gone-1))].Blocks = n
	}
}

// A walk finds the pods of a chain, part after part.
type walk[P comparable] struct {
	x       *Index[P]
	epoch   uint64
	chain   []uint64      // what is left of it
	single  [1]segment[P] // of a part without a run
	leading int           // keys that were held before the first that was not
	pieces  int           // in which they were found
	broken  bool          // one was not held
}

// A part is keys of a chain that were found at once: of a run those from begin up to end,
// without holes, or a single one, which has no set if it is not held.
type part[P comparable] struct {
	segments   []segment[P] // the first has begin, and there may be more than up to end
	begin, end int
}

func (x *Index[P]) walk(chain []uint64) walk[P] {
	return walk[P]{x: x, epoch: x.epoch.Load(), chain: chain}
}

// next returns the next part. It counts as read.
func (w *walk[P]) next() part[P] {
	p := w.find()
	n := p.end - p.begin
	w.chain = w.chain[n:]
	if w.broken = w.broken || p.segments[0].set == nil; !w.broken {
		w.leading += n
		w.pieces++
	}
	return p
}

// finish links a chain of which the walk found the leading keys in many pieces.
func (w *walk[P]) finish(chain []uint64) {
	if fragmented(w.leading, w.pieces) {
		w.x.relink(chain[:w.leading])
	}
}

func (w *walk[P]) find() part[P] {
	key := w.chain[0]
	t, i, word := w.x.keys.find(key)
	w.single[0] = segment[P]{nil, 1}
	if word.held() {
		if p := t.place(i); p.run() != 0 {
			if r := w.x.runs.at(p.run()).Load(); r != nil {
				if segments, n := r.find(w.chain, p.offset()); n > 0 {
					r.read(p.offset(), p.offset()+n, w.epoch)
					return part[P]{segments, p.offset(), p.offset() + n}
				}
			}
		}
		t.slots[i].read(word, w.epoch)
		w.single[0].set = w.x.podsOf(key, word)
	}
	return part[P]{w.single[:], 0, 1}
}

// pass moves begin behind the segments of a set, and returns how far.
func (p *part[P]) pass(set *podSet[P]) int {
	begin := p.begin
	for p.begin < p.end && p.segments[0].set == set {
		p.begin = min(p.segments[0].end, p.end)
		p.segments = p.segments[1:]
	}
	return p.begin - begin
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
			part := walk.next()
			for part.begin < part.end {
				set := part.segments[0].set
				keys := part.pass(set)
				if set != nil && !yield(Stretch[P]{n, n + keys, set.pods}) {
					return
				}
				n += keys
			}
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
