// SPDX-License-Identifier: Apache-2.0

package kvindex

// Recency is counted in epochs of capacity/epochsPerCapacity admissions. A read stores
// the epoch at most once: into a key's slot, or into the stamp of its part of a run. The
// order of eviction is by epoch, and within one what was read goes before what was added,
// as an epoch ends with an admission: LRU up to 1/128 of the capacity.
const epochsPerCapacity = 128

// maxBuckets keeps the epochs of all queued keys so close that 16 bits tell them apart.
const maxBuckets = 1 << 12

// recency queues keys by the epoch they were added in, or found read in since: a key
// that was read moves only when its turn to be evicted comes. A key that is removed
// stays queued; whoever takes it from the queue has to see whether it still counts.
type recency struct {
	epoch    uint64 // the current one
	perEpoch int    // admissions in one
	admitted int    // admissions in the current one
	oldest   uint64 // epoch of buckets[0]
	buckets  []bucket
	entries  int
	limit    int // of entries, before those that no longer count are dropped
}

// A bucket is the queue of one epoch.
type bucket struct {
	read  fifo
	added fifo
}

type fifo struct {
	keys []uint64
	next int
}

func (f *fifo) empty() bool { return f.next == len(f.keys) }

func (f *fifo) push(key uint64) { f.keys = append(f.keys, key) }

func (f *fifo) pop() uint64 {
	f.next++
	return f.keys[f.next-1]
}

const minQueueLimit = 1 << 12

func (q *recency) init(capacity int) {
	q.perEpoch = max(1, capacity/epochsPerCapacity)
	q.limit = minQueueLimit
}

// admit queues a new key and returns the epoch it was added in.
func (q *recency) admit(key uint64) uint64 {
	epoch := q.epoch
	q.bucket(epoch).added.push(key)
	// What is read after the last admission of an epoch is more recent than that.
	if q.admitted++; q.admitted == q.perEpoch {
		q.admitted = 0
		q.epoch++
	}
	return epoch
}

// bucket returns the queue of an epoch, for one more key.
func (q *recency) bucket(epoch uint64) *bucket {
	for q.oldest+uint64(len(q.buckets)) <= epoch {
		q.buckets = append(q.buckets, bucket{})
	}
	q.entries++
	return &q.buckets[epoch-q.oldest]
}

// pop takes the first key of the oldest epoch. There must be one.
func (q *recency) pop() (key, epoch uint64) {
	for q.buckets[0].read.empty() && q.buckets[0].added.empty() {
		q.buckets[0] = bucket{}
		q.buckets = q.buckets[1:]
		q.oldest++
	}
	q.entries--
	b := &q.buckets[0]
	if !b.read.empty() {
		return b.read.pop(), q.oldest
	}
	return b.added.pop(), q.oldest
}

// crowded reports whether the queue holds much that no longer counts, or epochs so old
// that their numbers might be taken for others.
func (q *recency) crowded() bool {
	return q.entries > q.limit || len(q.buckets) > maxBuckets
}

// tidy drops what no longer counts from the queue. The oldest half of the epochs become
// one, if there are too many.
func (x *Index[P]) tidy() {
	q := &x.queue
	old := *q
	q.buckets, q.entries = nil, 0
	if len(old.buckets) > maxBuckets {
		q.oldest = q.epoch - maxBuckets/2
	}
	for old.entries > 0 {
		key, epoch := old.pop()
		if s, i := x.counts(key, epoch); i >= 0 {
			t := s.table.Load()
			x.requeue(t, i, key, max(q.oldest, x.readEpoch(t, i)))
		}
	}
	q.limit = max(minQueueLimit, 2*q.entries)
}

// counts returns where a key is that was taken from the queue of an epoch, or -1 if it
// was removed since, or is queued elsewhere.
func (x *Index[P]) counts(key, epoch uint64) (*shard, int) {
	s, hash := x.keys.shard(key)
	t := s.table.Load()
	i, w := t.find(hash, key)
	if w.held() && t.place(i).queued() == uint16(epoch) {
		return s, i
	}
	return nil, -1
}

// readEpoch returns the epoch in which a slot's key was last added or read.
func (x *Index[P]) readEpoch(t *table, i int) uint64 {
	read := word(t.slots[i].word.Load()).epochNear(x.queue.epoch)
	if p := t.place(i); p.run() != 0 {
		read = max(read, x.runs.at(p.run()).Load().lastRead(p.offset()))
	}
	return read
}

// markRead marks a slot's key as read in an epoch, unless it was since.
func (x *Index[P]) markRead(t *table, i int, epoch uint64) {
	if w := word(t.slots[i].word.Load()); w.epochNear(x.queue.epoch) < epoch {
		t.slots[i].read(w, epoch)
	}
}

// requeue queues a slot's key in an epoch no earlier than that of its last read.
func (x *Index[P]) requeue(t *table, i int, key, epoch uint64) {
	x.queue.bucket(epoch).read.push(key)
	t.setQueued(i, epoch)
	x.markRead(t, i, epoch)
}

// evictOldest removes the key least recently added or read.
func (x *Index[P]) evictOldest() {
	for {
		key, epoch := x.queue.pop()
		s, i := x.counts(key, epoch)
		if i < 0 {
			continue
		}
		t := s.table.Load()
		if read := x.readEpoch(t, i); read > epoch {
			x.requeue(t, i, key, read)
			continue
		}
		if x.evicted != nil {
			x.evicted(x.setOf(word(t.slots[i].word.Load())).pods)
		}
		x.remove(s, i)
		return
	}
}
