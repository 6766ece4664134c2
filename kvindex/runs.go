// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"slices"
	"sync/atomic"
)

// A run is a stretch of a chain: its keys side by side, and the pods that hold them by
// segment. A reader that finds the first of them compares the others in one pass and
// asks the table for none. A key is in one run at most; its slot says where. The run of
// a key that is gone, or that went to another run, has a hole in its place.
type run[P comparable] struct {
	index    uint32
	live     int32    // keys that are not holes; writers only
	keys     []uint64 // never changed
	segments atomic.Pointer[[]segment[P]]
	stamps   []atomic.Uint64 // the epoch of the last read, for every keysPerStamp keys
}

// A segment is the part of a run that begins where the one before it ends and that the
// same pods hold. It is never changed. A hole has no set.
type segment[P comparable] struct {
	set *podSet[P]
	end int
}

const (
	// maxRun bounds what it costs to change the pods of one key of a run.
	maxRun = 512
	// keysPerStamp keys of a run count as read when one of them is.
	keysPerStamp = 16
	// keysPerPiece is how many keys a reader should find at once, on average.
	keysPerPiece = 32
	// minLinked keys of a chain are worth a run.
	minLinked = 16
)

// A place is where a key is beside its slot: the index (32 bits) of its run, zero if it
// is in none, and its offset (16) there; and the epoch (low 16 bits) in whose queue it
// is.
type place uint64

func placed(run uint32, offset int, queued uint16) place {
	return place(run)<<32 | place(offset)<<16 | place(queued)
}

func (p place) run() uint32    { return uint32(p >> 32) }
func (p place) offset() int    { return int(uint16(p >> 16)) }
func (p place) queued() uint16 { return uint16(p) }

// before reports whether a key at p is followed by the one at next in the same run.
func (p place) before(next place) bool {
	return p.run() != 0 && p.run() == next.run() && p.offset()+1 == next.offset()
}

// fragmented reports whether a chain was found in so many pieces that it is worth linking.
func fragmented(keys, pieces int) bool {
	return keys >= minLinked && pieces > 2+keys/keysPerPiece
}

// matching returns how many leading keys two chains share. Arrays are compared as fast as
// the machine can.
func matching(a, b []uint64) int {
	const width = 32
	length := min(len(a), len(b))
	n := 0
	for n+width <= length && *(*[width]uint64)(a[n:]) == *(*[width]uint64)(b[n:]) {
		n += width
	}
	for n < length && a[n] == b[n] {
		n++
	}
	return n
}

// find returns how many keys of a chain the run has from an offset on, without a hole in
// between, and its segments from there on. It may be the wrong run: that has none.
func (r *run[P]) find(chain []uint64, offset int) ([]segment[P], int) {
	if offset >= len(r.keys) || r.keys[offset] != chain[0] {
		return nil, 0
	}
	end := offset + matching(r.keys[offset:], chain)
	segments := *r.segments.Load()
	if offset > 0 {
		segments = segments[at(segments, offset):]
	}
	from := offset
	for _, s := range segments {
		if s.set == nil {
			end = min(end, from)
		}
		if from = s.end; from >= end {
			break
		}
	}
	return segments, end - offset
}

// extend returns segments with a set from where they end up to another end.
func extend[P comparable](segments []segment[P], set *podSet[P], end int) []segment[P] {
	if last := len(segments) - 1; last >= 0 && segments[last].set == set {
		segments[last].end = end
		return segments
	}
	return append(segments, segment[P]{set, end})
}

// at returns which segment has an offset.
func at[P comparable](segments []segment[P], offset int) int {
	i, _ := slices.BinarySearchFunc(segments, offset+1, func(s segment[P], end int) int {
		return s.end - end
	})
	return i
}

// assign gives a part of the run another set.
func (r *run[P]) assign(set *podSet[P], begin, end int) {
	old := *r.segments.Load()
	segments := make([]segment[P], 0, len(old)+2)
	if begin > 0 {
		first := at(old, begin-1)
		segments = append(segments, old[:first]...)
		segments = append(segments, segment[P]{old[first].set, begin})
	}
	segments = extend(segments, set, end)
	if end < len(r.keys) {
		last := at(old, end)
		segments = extend(segments, old[last].set, old[last].end)
		segments = append(segments, old[last+1:]...)
	}
	r.segments.Store(&segments)
}

// read marks a part of the run as read in an epoch.
func (r *run[P]) read(begin, end int, epoch uint64) {
	stamps := r.stamps[begin/keysPerStamp : (end-1)/keysPerStamp+1]
	for i := range stamps {
		if last := stamps[i].Load(); last < epoch {
			// If another goroutine was faster, it has done as much.
			stamps[i].CompareAndSwap(last, epoch)
		}
	}
}

// lastRead returns the epoch in which a key was last read as part of the run.
func (r *run[P]) lastRead(offset int) uint64 {
	return r.stamps[offset/keysPerStamp].Load()
}

// A runTable is the runs by index, for readers without a lock. The rest of it is the
// writers'.
type runTable[P comparable] struct {
	directory[run[P]]
	unused  uint32 // the lowest index never used
	free    []uint32
	change  change[P]
	sparse  []*run[P] // those that lost so many keys that they are to be made anew
	scratch []segment[P]
}

func (t *runTable[P]) init() {
	t.directory.init()
	t.unused = 1 // index 0 is that of keys without a run
}

// A change is what a part of a run is about to get as its set. Writers change neighbours
// one after the other, so one copy of the segments does for many keys.
type change[P comparable] struct {
	run        *run[P]
	set        *podSet[P]
	begin, end int
}

// assign gives a key of a run another set, by the time of the next flush.
func (t *runTable[P]) assign(r *run[P], offset int, set *podSet[P]) {
	c := &t.change
	switch {
	case c.run == r && c.set == set && c.begin == offset+1:
		c.begin--
	case c.run == r && c.set == set && c.end == offset:
		c.end++
	default:
		t.flush()
		t.change = change[P]{r, set, offset, offset + 1}
	}
}

func (t *runTable[P]) flush() {
	if c := t.change; c.run != nil {
		c.run.assign(c.set, c.begin, c.end)
		t.change = change[P]{}
	}
}

// take returns an index for one more run.
func (t *runTable[P]) take() uint32 {
	if last := len(t.free) - 1; last >= 0 {
		index := t.free[last]
		t.free = t.free[:last]
		return index
	}
	t.unused++
	t.grow(t.unused - 1)
	return t.unused - 1
}

// lose notes that a key of a run is a hole now. A run without keys is gone.
func (t *runTable[P]) lose(r *run[P], offset int) {
	t.assign(r, offset, nil)
	r.live--
	if r.live == 0 {
		t.at(r.index).Store(nil)
		t.free = append(t.free, r.index)
	} else if int(r.live) == (len(r.keys)-1)/2 {
		t.sparse = append(t.sparse, r)
	}
}

// settle ends what a writer does: readers see all of it, and no run is half holes.
func (x *Index[P]) settle() {
	x.runs.flush()
	for _, r := range x.runs.sparse {
		if r.live > 0 {
			x.condense(r)
		}
	}
	x.runs.sparse = x.runs.sparse[:0]
	x.runs.flush()
}

// condense makes new runs of what is left of one, and gives it up.
func (x *Index[P]) condense(r *run[P]) {
	begin, from := 0, 0 // of the keys without holes in between, and of the segment
	for _, s := range *r.segments.Load() {
		if s.set == nil {
			x.bind(r.keys[begin:from])
			begin = s.end
		}
		from = s.end
	}
	x.bind(r.keys[begin:from])
}

// link makes runs of those parts of a chain that are found piece by piece.
func (x *Index[P]) link(chain []uint64) {
	begin := 0
	for n := 0; n < len(chain); {
		piece := x.piece(chain[n:])
		if piece > 0 && piece < 2*keysPerPiece {
			n += piece
			continue
		}
		x.bindAll(chain[begin:n])
		n += max(1, piece)
		begin = n
	}
	x.bindAll(chain[begin:])
}

// maxRelinked keys are what one reader links at most, as writers wait for it meanwhile.
const maxRelinked = maxRun

// relink is link for a reader that found a chain in many pieces: of the first keys that
// are not linked. The next readers link the others. It does not wait for its turn.
func (x *Index[P]) relink(chain []uint64) {
	if !x.mu.TryLock() {
		return
	}
	defer x.mu.Unlock()
	n := 0
	for n < len(chain) {
		piece := x.piece(chain[n:])
		if piece > 0 && piece < 2*keysPerPiece {
			break
		}
		n += max(1, piece)
	}
	x.link(chain[n:min(len(chain), n+maxRelinked)])
	x.settle()
}

// piece returns how many keys of a chain are found at once, zero if the first is not
// held.
func (x *Index[P]) piece(chain []uint64) int {
	t, i, w := x.keys.find(chain[0])
	if !w.held() {
		return 0
	}
	p := t.place(i)
	if p.run() == 0 {
		return 1
	}
	x.runs.flush()
	_, n := x.runs.at(p.run()).Load().find(chain, p.offset())
	return n
}

// bind makes runs of keys that are held, or takes them out of their run if they are few.
func (x *Index[P]) bind(keys []uint64) {
	if len(keys) >= minLinked {
		x.bindAll(keys)
		return
	}
	for _, key := range keys {
		t, i, _ := x.keys.find(key)
		x.leave(t, i)
	}
}

func (x *Index[P]) bindAll(keys []uint64) {
	for len(keys) > 0 {
		keys = keys[x.bindSome(keys[:min(len(keys), maxRun)]):]
	}
}

// bindSome makes a run of keys that are held, up to the first that was among them
// before, and returns of how many.
func (x *Index[P]) bindSome(keys []uint64) int {
	index := x.runs.take()
	segments := x.runs.scratch[:0]
	n := 0
	for ; n < len(keys); n++ {
		t, i, w := x.keys.find(keys[n])
		if t.place(i).run() == index {
			break
		}
		x.leave(t, i)
		t.setPlace(i, placed(index, n, t.place(i).queued()))
		segments = extend(segments, x.setOf(w), n+1)
	}
	x.runs.scratch = segments
	r := &run[P]{
		index:  index,
		live:   int32(n),
		keys:   slices.Clone(keys[:n]),
		stamps: make([]atomic.Uint64, (n-1)/keysPerStamp+1),
	}
	segments = slices.Clone(segments)
	r.segments.Store(&segments)
	x.runs.at(index).Store(r)
	return n
}

// leave takes the key of a slot out of its run.
func (x *Index[P]) leave(t *table, i int) {
	p := t.place(i)
	if p.run() == 0 {
		return
	}
	r := x.runs.at(p.run()).Load()
	x.markRead(t, i, r.lastRead(p.offset()))
	t.setPlace(i, placed(0, 0, p.queued()))
	x.runs.lose(r, p.offset())
}

// setChanged tells the run of a slot's key which set the key has now.
func (x *Index[P]) setChanged(t *table, i int, set *podSet[P]) {
	if p := t.place(i); p.run() != 0 {
		x.runs.assign(x.runs.at(p.run()).Load(), p.offset(), set)
	}
}
