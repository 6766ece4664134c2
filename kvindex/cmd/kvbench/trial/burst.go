// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"errors"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/results"
)

// BurstConfig is the load of upstream's pull request 562: many readers come at once,
// while every pod reports blocks.
type BurstConfig struct {
	Capacity int // keys
	Readers  int // in a burst
	Blocks   int // in a hot prefix
	Bursts   int
	Period   time.Duration // from one burst to the next
	// EventsPerSecond is what all writers together are meant to send.
	EventsPerSecond float64
	// Deadline is when the trial stops, finished or not.
	Deadline time.Time
}

// A lookup is one reader's part in a burst.
type lookup struct {
	reader  design.Reader
	latency time.Duration // from the burst's intended release to the end
	service time.Duration // from the beginning to the end
	done    atomic.Bool   // set last: the rest may be read
}

// A burst is the lookups that were meant to begin at one moment.
type burst struct {
	lookups []lookup
	late    time.Duration // from the intended release to the release
	running sync.WaitGroup
}

// bursts is a trial under way.
type bursts struct {
	config BurstConfig
	index  design.Index
	hot    *hotSet

	mu      sync.Mutex
	idle    []design.Reader
	started []*burst
	covered coverage
}

// Burst fills an index, and measures lookups of hot prefixes while writers write.
func Burst(index design.Index, config BurstConfig) (*results.Burst, error) {
	if config.Readers < 1 || config.Bursts < 1 || config.Period <= 0 || config.EventsPerSecond <= 0 {
		return nil, errors.New("a burst trial needs readers, bursts, a period and events")
	}
	hot, err := newHotSet(config.Blocks, config.Capacity)
	if err != nil {
		return nil, err
	}
	hot.fill(index, config.Capacity)
	b := &bursts{config: config, index: index, hot: hot, covered: coverage{min: 1}}
	result := &results.Burst{
		Readers:               config.Readers,
		Blocks:                config.Blocks,
		Bursts:                config.Bursts,
		StatedEventsPerSecond: config.EventsPerSecond,
		Capacity:              config.Capacity,
		AllocsPerLookup:       b.warm(),
	}
	b.measure(result)
	return result, nil
}

// warm makes readers for a burst and for the next one, which start while it is running,
// each with its buffers grown. It returns the allocations of a lookup while nobody
// writes.
func (b *bursts) warm() float64 {
	for i := range 2 * b.config.Readers {
		reader := b.index.NewReader()
		reader.Lookup(b.hot.prefix(i))
		b.idle = append(b.idle, reader)
	}
	return b.allocsPerLookup()
}

// allocsPerLookup takes the least of some attempts: now and then the runtime allocates
// something for itself.
func (b *bursts) allocsPerLookup() float64 {
	const attempts, lookups = 5, 100
	least := math.Inf(1)
	runtime.GC()
	for range attempts {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for i := range lookups {
			b.idle[0].Lookup(b.hot.prefix(i))
		}
		runtime.ReadMemStats(&after)
		least = min(least, float64(after.Mallocs-before.Mallocs)/lookups)
	}
	return least
}

func (b *bursts) measure(result *results.Burst) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	begin := time.Now()
	writers := startWriters(b.index, b.hot, b.config, begin)
	finished := b.releaseAll(begin)
	sent, lateness := writers.stop()
	elapsed := time.Since(begin)
	runtime.ReadMemStats(&after)

	result.Stopped = !finished
	result.EventsPerSecond = float64(sent) / elapsed.Seconds()
	result.Lateness = lateness
	result.GCCycles = after.NumGC - before.NumGC
	result.Seconds = elapsed.Seconds()
	if finished { // else a reader may be at it, and not every design bears that
		result.Len = b.index.Len()
	}
	b.sumUp(result)
}

// releaseAll releases a burst every period, whether or not the last one is done, and
// reports whether all lookups ended before the deadline.
func (b *bursts) releaseAll(begin time.Time) bool {
	finished := make(chan struct{})
	var running sync.WaitGroup
	for n := range b.config.Bursts {
		intended := begin.Add(time.Duration(n+1) * b.config.Period)
		if intended.After(b.config.Deadline) {
			return false
		}
		running.Add(1)
		go func(next *burst) {
			defer running.Done()
			next.running.Wait()
			b.collect(next)
		}(b.release(n, intended))
	}
	go func() {
		running.Wait()
		close(finished)
	}()
	select {
	case <-finished:
		return true
	case <-time.After(time.Until(b.config.Deadline)):
		return false
	}
}

// release starts the readers of a burst ahead of time, but so late that those of the last
// burst should not mind, and lets them go.
func (b *bursts) release(n int, intended time.Time) *burst {
	time.Sleep(time.Until(intended) - b.config.Period/2)
	next := &burst{lookups: make([]lookup, b.config.Readers)}
	gate := make(chan struct{})
	var ready sync.WaitGroup
	for i := range next.lookups {
		l := &next.lookups[i]
		l.reader = b.reader()
		prefix := b.hot.prefix(n + i)
		ready.Add(1)
		next.running.Go(func() {
			ready.Done()
			<-gate
			begin := time.Now()
			l.reader.Lookup(prefix)
			end := time.Now()
			l.latency = end.Sub(intended)
			l.service = end.Sub(begin)
			l.done.Store(true)
		})
	}
	ready.Wait()
	b.mu.Lock()
	b.started = append(b.started, next)
	b.mu.Unlock()
	sleepUntil(intended)
	next.late = time.Since(intended)
	close(gate)
	return next
}

// timerSlack is about how late a sleeping thread wakes up, on a virtual machine at that,
// which is not the index' doing.
const timerSlack = 2 * time.Millisecond

// sleepUntil returns at a moment as exactly as the load of the machine permits.
func sleepUntil(moment time.Time) {
	time.Sleep(time.Until(moment) - timerSlack)
	for time.Now().Before(moment) {
		runtime.Gosched()
	}
}

// reader returns one that no goroutine uses.
func (b *bursts) reader() design.Reader {
	b.mu.Lock()
	defer b.mu.Unlock()
	if last := len(b.idle) - 1; last >= 0 {
		reader := b.idle[last]
		b.idle = b.idle[:last]
		return reader
	}
	return b.index.NewReader() // the last burst is still running
}

// collect looks at what the readers of a burst found, once all are done: that must not
// keep any of them waiting.
func (b *bursts) collect(done *burst) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range done.lookups {
		reader := done.lookups[i].reader
		b.covered.add(float64(reader.Prefix()) / float64(b.config.Blocks))
		b.idle = append(b.idle, reader)
	}
}

// sumUp puts the latencies of all lookups that ended into the result.
func (b *bursts) sumUp(result *results.Burst) {
	b.mu.Lock()
	defer b.mu.Unlock()
	latency, service, late := newHistogram(), newHistogram(), newHistogram()
	for _, burst := range b.started {
		record(late, burst.late)
		result.Unfinished += sumUpBurst(burst, latency, service)
	}
	result.Latency, result.Service, result.Release = quantiles(latency), quantiles(service), quantiles(late)
	result.CoverageMean, result.CoverageMin = b.covered.mean(), b.covered.min
}

// sumUpBurst returns how many lookups had not ended.
func sumUpBurst(b *burst, latency, service *hdrhistogram.Histogram) (unfinished int64) {
	for i := range b.lookups {
		l := &b.lookups[i]
		if !l.done.Load() {
			unfinished++
			continue
		}
		record(latency, l.latency)
		record(service, l.service)
	}
	return unfinished
}

// coverage is how much of the prefixes was found.
type coverage struct {
	sum float64
	min float64
	n   int
}

func (c *coverage) add(part float64) {
	c.sum += part
	c.n++
	c.min = min(c.min, part)
}

// mean is 0 if nothing was found because nothing ended.
func (c *coverage) mean() float64 {
	if c.n == 0 {
		return 0
	}
	return c.sum / float64(c.n)
}
