// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/results"
)

const (
	writerPods  = 40 // each pod's events come from a goroutine of its own
	hotPrefixes = 8
)

// A hotSet is the prefixes that everybody asks for.
type hotSet struct {
	pods     []string
	prefixes [hotPrefixes][]uint64
	next     uint64 // number of the first key not in use
}

// newHotSet refuses prefixes that the index has no room for.
func newHotSet(blocks, capacity int) (*hotSet, error) {
	if blocks < 1 || 2*blocks*hotPrefixes > capacity {
		return nil, fmt.Errorf("%d prefixes of %d blocks do not fit twice into %d keys", hotPrefixes, blocks, capacity)
	}
	h := &hotSet{pods: podNames(writerPods)}
	for i := range h.prefixes {
		h.prefixes[i] = newKeys(h.next, blocks)
		h.next += uint64(blocks)
	}
	return h, nil
}

// prefix returns one of the prefixes, all in turn.
func (h *hotSet) prefix(n int) []uint64 { return h.prefixes[n%hotPrefixes] }

// holder returns the n-th of the pods that hold a prefix.
func (h *hotSet) holder(prefix, n int) int {
	return (prefix*writerPods/hotPrefixes + n) % writerPods
}

// heldBy returns the prefixes that a pod holds.
func (h *hotSet) heldBy(pod int) [][]uint64 {
	var held [][]uint64
	for i, prefix := range h.prefixes {
		for n := range podsPerChain {
			if h.holder(i, n) == pod {
				held = append(held, prefix)
			}
		}
	}
	return held
}

// fill brings an index to its ceiling with chains that nobody asks for, and adds the
// hot prefixes last, so that eviction is live.
func (h *hotSet) fill(index design.Index, capacity int) {
	const blocks = 256
	chain := make([]uint64, blocks)
	for added := 0; added < capacity; added += blocks {
		fillKeys(chain, h.next)
		index.Add(chain, h.pods[added/blocks%writerPods])
		h.next += blocks
	}
	for i, prefix := range h.prefixes {
		for n := range podsPerChain {
			index.Add(prefix, h.pods[h.holder(i, n)])
		}
	}
}

// writers send the events of all pods.
type writers struct {
	each    []writer
	stopped chan struct{}
	running sync.WaitGroup

	mu       sync.Mutex
	sent     int64
	lateness *hdrhistogram.Histogram // from an event's intended time to its sending
}

// A writer sends the events of one pod, each at its time.
type writer struct {
	index  design.Index
	pod    string
	hot    [][]uint64 // that it reports again
	random *rand.Rand
	fresh  []uint64
	next   uint64 // number of its next fresh key
}

// startWriters starts one for each pod. Their events come at a fixed interval, each
// writer's at a phase of its own.
func startWriters(index design.Index, hot *hotSet, config BurstConfig, begin time.Time) *writers {
	interval := time.Duration(writerPods / config.EventsPerSecond * float64(time.Second))
	w := &writers{
		each:     make([]writer, writerPods),
		stopped:  make(chan struct{}),
		lateness: newHistogram(),
	}
	for i := range w.each {
		w.each[i] = writer{
			index:  index,
			pod:    hot.pods[i],
			random: rand.New(rand.NewPCG(uint64(i), 0)),
			fresh:  make([]uint64, eventKeys),
			next:   hot.next + uint64(i)<<40,
			hot:    hot.heldBy(i),
		}
		first := begin.Add(interval * time.Duration(i) / writerPods)
		w.running.Go(func() { w.run(&w.each[i], first, interval) })
	}
	return w
}

// run sends an event at every intended time. If it is late it sends at once: a slow
// index does not get fewer events.
func (w *writers) run(writer *writer, intended time.Time, interval time.Duration) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		timer.Reset(time.Until(intended))
		select {
		case <-w.stopped:
			return
		case <-timer.C:
		}
		late := time.Since(intended)
		writer.send()
		w.note(late)
		intended = intended.Add(interval)
	}
}

// send reports fresh blocks, or as often blocks of a hot prefix once more.
func (w *writer) send() {
	if len(w.hot) > 0 && w.random.IntN(2) == 0 {
		prefix := w.hot[w.random.IntN(len(w.hot))]
		size := min(eventKeys, len(prefix))
		at := w.random.IntN(len(prefix) - size + 1)
		w.index.Add(prefix[at:at+size], w.pod)
		return
	}
	fillKeys(w.fresh, w.next)
	w.next += eventKeys
	w.index.Add(w.fresh, w.pod)
}

func (w *writers) note(late time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	record(w.lateness, late)
	w.sent++
}

// stop returns how many events were sent, and how late. It waits for those being sent
// only for a second, as the index may be stuck.
func (w *writers) stop() (sent int64, lateness results.Quantiles) {
	close(w.stopped)
	done := make(chan struct{})
	go func() {
		w.running.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(time.Second):
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sent, quantiles(w.lateness)
}
