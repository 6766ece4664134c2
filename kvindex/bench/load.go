// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvtax/kvindex"
)

// The load, of which peer/src/main.rs has a copy.
const (
	podCount     = 40
	hotPrefixes  = 8
	eventBlocks  = 16
	fillerBlocks = 256
	// keptEvents of fresh blocks are what a pod keeps before it reports the oldest as removed.
	keptEvents = 64
)

type (
	index = kvindex.Index[string]
	score = kvindex.PodScore[string]
)

var podNames = func() []string {
	names := make([]string, podCount)
	for i := range names {
		names[i] = fmt.Sprintf("10.0.0.%d:8000", i+1)
	}
	return names
}()

// mix spreads numbers over 64 bits as block hashes are (the finalizer of SplitMix64).
func mix(n uint64) uint64 {
	n += 0x9E3779B97F4A7C15
	n = (n ^ n>>30) * 0xBF58476D1CE4E5B9
	n = (n ^ n>>27) * 0x94D049BB133111EB
	return n ^ n>>31
}

func newChain(first uint64, blocks int) []uint64 {
	chain := make([]uint64, blocks)
	for i := range chain {
		chain[i] = mix(first + uint64(i))
	}
	return chain
}

func newIndex(capacity, holders int) (*index, error) {
	return kvindex.New[string](kvindex.Config{Capacity: capacity, MaxPodsPerKey: max(10, holders)})
}

// A hotSet is the prefixes that everybody asks for, and who holds how much of each.
type hotSet struct {
	prefixes [hotPrefixes][]uint64
	holders  int
	depths   bool   // each holder has another part
	fork     int    // other prompts part at every so many blocks, if not 0
	next     uint64 // number of the first key not in use
}

func newHotSet(a arguments) *hotSet {
	h := &hotSet{holders: a.get("holders", 10), depths: a.get("depths", 0) == 1, fork: a.get("fork", 0)}
	for i := range h.prefixes {
		h.prefixes[i] = newChain(h.next, a.get("blocks", 263))
		h.next += uint64(len(h.prefixes[i]))
	}
	return h
}

func (h *hotSet) blocks() int           { return len(h.prefixes[0]) }
func (h *hotSet) prefix(n int) []uint64 { return h.prefixes[n%hotPrefixes] }

// holder returns the n-th of the pods that hold a prefix.
func (h *hotSet) holder(prefix, n int) int {
	return (prefix*podCount/hotPrefixes + n) % podCount
}

// depth returns how many blocks the n-th holder of a prefix holds.
func (h *hotSet) depth(n int) int {
	if h.depths {
		return h.blocks() * (n + 1) / h.holders
	}
	return h.blocks()
}

func (h *hotSet) heldBy(pod int) [][]uint64 {
	var held [][]uint64
	for i, prefix := range h.prefixes {
		for n := range h.holders {
			if h.holder(i, n) == pod {
				held = append(held, prefix)
			}
		}
	}
	return held
}

func (h *hotSet) fill(x *index, filler int) {
	for added := 0; added < filler; added += fillerBlocks {
		x.Add(newChain(h.next, fillerBlocks), podNames[added/fillerBlocks%podCount])
		h.next += fillerBlocks
	}
	for i, prefix := range h.prefixes {
		for n := h.holders - 1; n >= 0; n-- {
			x.Add(prefix[:h.depth(n)], podNames[h.holder(i, n)])
		}
		for k := 0; h.fork > 0 && (k+1)*h.fork < len(prefix); k++ {
			branch := []uint64{mix(1<<62 | uint64(i*4096+k))}
			x.Add(branch, podNames[h.holder(i, h.holders-1)])
		}
	}
}

// right reports whether scores are what fill has stored, by number of pods alone if their
// depths differ.
func (h *hotSet) right(scores []score) bool {
	return len(scores) == h.holders &&
		(h.depths || !slices.ContainsFunc(scores, func(s score) bool { return s.Blocks != h.blocks() }))
}

// random is a small generator that both sides have.
type random uint64

func (r *random) below(n int) int {
	*r++
	high, _ := bits.Mul64(mix(uint64(*r)), uint64(n))
	return int(high)
}

// writers send the events of all pods, each from a goroutine of its own.
type writers struct {
	begin   time.Time
	stopped atomic.Bool
	running sync.WaitGroup

	mu   sync.Mutex
	late []time.Duration // from an event's intended time to its sending
}

// startWriters has eventsPerS sent in all, at a fixed interval, each pod's at a phase of
// its own: half of them prefixes once more, half fresh, each of these with the removal of
// as many blocks.
func startWriters(x *index, h *hotSet, eventsPerS int) *writers {
	kept := make([][][]uint64, podCount)
	for pod := range kept {
		for n := range keptEvents {
			chain := newChain(h.next+uint64(pod+100)<<40+uint64(n*eventBlocks), eventBlocks)
			x.Add(chain, podNames[pod])
			kept[pod] = append(kept[pod], chain)
		}
	}
	w := &writers{begin: time.Now()}
	interval := time.Second * podCount / time.Duration(eventsPerS)
	for pod := range kept {
		first := w.begin.Add(interval * time.Duration(pod) / podCount)
		w.running.Go(func() { w.write(x, h, pod, kept[pod], first, interval) })
	}
	return w
}

// write sends an event at every intended time, at once if it is late.
func (w *writers) write(x *index, h *hotSet, pod int, kept [][]uint64, intended time.Time, interval time.Duration) {
	held := h.heldBy(pod)
	rnd := random(uint64(pod) << 32)
	next := h.next + uint64(pod+1)<<40
	for {
		time.Sleep(time.Until(intended))
		if w.stopped.Load() {
			return
		}
		late := time.Since(intended)
		if len(held) > 0 && rnd.below(2) == 0 {
			prefix := held[rnd.below(len(held))]
			at := rnd.below(len(prefix) - eventBlocks + 1)
			x.Add(prefix[at:at+eventBlocks], podNames[pod])
		} else {
			chain := newChain(next, eventBlocks)
			next += eventBlocks
			x.Add(chain, podNames[pod])
			kept = append(kept, chain)
			for _, key := range kept[0] {
				x.Evict(key, podNames[pod])
			}
			kept = kept[1:]
		}
		w.mu.Lock()
		w.late = append(w.late, late)
		w.mu.Unlock()
		intended = intended.Add(interval)
	}
}

func (w *writers) stop() *events {
	w.stopped.Store(true)
	elapsed := time.Since(w.begin)
	w.running.Wait()
	return &events{PerS: float64(len(w.late)) / elapsed.Seconds(), Late: quantilesOf(w.late)}
}
