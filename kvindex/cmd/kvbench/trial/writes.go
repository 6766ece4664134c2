// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"fmt"
	"runtime"
	"sync"
	"time"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/results"
)

// WritesConfig is how long an index is written to.
type WritesConfig struct {
	Capacity int // keys
	// Duration is for how long each of the four figures is measured, at least.
	Duration time.Duration
}

// Writes measures how fast an index takes events: keys added while as many are evicted,
// and keys evicted that are held.
func Writes(index design.Index, config WritesConfig) (*results.Writes, error) {
	cores := runtime.GOMAXPROCS(0)
	if config.Capacity < 2*eventKeys*cores || config.Duration <= 0 {
		return nil, fmt.Errorf("writes need a duration, and a capacity of at least %d keys", 2*eventKeys*cores)
	}
	w := &eventWriter{index: index, pods: podNames(cores)}
	keys := w.newEvents(config.Capacity)
	w.each(1, keys, w.add) // to the ceiling
	result := &results.Writes{Capacity: config.Capacity}
	result.AddKeysPerSecond = w.addRate(1, config)
	result.AddAllKeysPerSecond = w.addRate(cores, config)
	result.EvictKeysPerSecond, result.Evicted = w.evictRate(1, config)
	result.EvictAllKeysPerSecond, result.EvictedByAll = w.evictRate(cores, config)
	return result, nil
}

type eventWriter struct {
	index design.Index
	pods  []string
	next  uint64 // number of the first key not in use
}

// newEvents returns keys never added before, whole events.
func (w *eventWriter) newEvents(keys int) []uint64 {
	events := newKeys(w.next, keys/eventKeys*eventKeys)
	w.next += uint64(len(events))
	return events
}

// addRate returns keys added a second by some goroutines.
func (w *eventWriter) addRate(goroutines int, config WritesConfig) float64 {
	added, elapsed := 0, time.Duration(0)
	for elapsed < config.Duration {
		keys := w.newEvents(config.Capacity)
		elapsed += w.each(goroutines, keys, w.add)
		added += len(keys)
	}
	return float64(added) / elapsed.Seconds()
}

// evictRate returns keys evicted a second by some goroutines, and which part of them the
// index held. They evict what was added last, and half of the capacity only, so that it
// should be held; adding it is not timed.
func (w *eventWriter) evictRate(goroutines int, config WritesConfig) (keysPerSecond, part float64) {
	evicted, gone, elapsed := 0, 0, time.Duration(0)
	for elapsed < config.Duration {
		keys := w.newEvents(config.Capacity / 2)
		w.each(goroutines, keys, w.add)
		before := w.index.Len()
		elapsed += w.each(goroutines, keys, w.evict)
		gone += before - w.index.Len()
		evicted += len(keys)
	}
	return float64(evicted) / elapsed.Seconds(), float64(gone) / float64(evicted)
}

func (w *eventWriter) add(event []uint64, pod string) { w.index.Add(event, pod) }

func (w *eventWriter) evict(event []uint64, pod string) {
	for _, key := range event {
		w.index.Evict(key, pod)
	}
}

// each lets goroutines do something with the events in keys, each with a part of them,
// and returns how long that took.
func (w *eventWriter) each(goroutines int, keys []uint64, do func(event []uint64, pod string)) time.Duration {
	events := len(keys) / eventKeys
	begin := time.Now()
	var running sync.WaitGroup
	for g := range goroutines {
		part := keys[events*g/goroutines*eventKeys : events*(g+1)/goroutines*eventKeys]
		running.Go(func() {
			for ; len(part) > 0; part = part[eventKeys:] {
				do(part[:eventKeys], w.pods[g])
			}
		})
	}
	running.Wait()
	return time.Since(begin)
}
