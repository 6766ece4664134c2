// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/bits"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtax/kvtax/kvindex"
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

// A store is an index as the load uses it.
type store interface {
	Add(chain []uint64, pods ...string)
	Evict(key uint64, pods ...string) bool
	Score(chain []uint64, scores []score) []score
}

func newIndex(capacity, holders int) (*index, error) {
	return kvindex.New[string](kvindex.Config{Capacity: capacity, MaxPodsPerKey: max(10, holders)})
}

// newStore returns the design of that number.
func newStore(a arguments, capacity, holders int) (store, error) {
	if design := a.get("design", 0); design > 0 {
		return newNested(capacity, max(10, holders), design == peekDesign)
	}
	return newIndex(capacity, holders)
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

func (h *hotSet) fill(x store, filler int) {
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
func startWriters(x store, h *hotSet, eventsPerS int) *writers {
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
func (w *writers) write(x store, h *hotSet, pod int, kept [][]uint64, intended time.Time, interval time.Duration) {
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

// A result is what a trial of either side prints. What its kind does not measure is left
// out.
type result struct {
	Latency       *quantiles `json:"latency,omitempty"`       // of a lookup; in bursts from the intended release
	Service       *quantiles `json:"service,omitempty"`       // of a lookup in a burst, from its own beginning
	ReleasedLate  *quantiles `json:"released_late,omitempty"` // bursts, after the intended moment
	LookupsPerS   float64    `json:"lookups_per_s,omitempty"`
	BytesPerBlock float64    `json:"bytes_per_block,omitempty"` // growth of the process
	Events        *events    `json:"events,omitempty"`
	Wrong         int        `json:"wrong"`             // answers
	Answers       []string   `json:"answers,omitempty"` // for each prefix, pod:blocks
	Kept          int        `json:"kept,omitempty"`    // blocks of a prompt that is only read
}

// events are what the writers sent beside the lookups.
type events struct {
	PerS float64    `json:"per_s"`
	Late *quantiles `json:"late"`
}

type quantiles struct {
	N     int     `json:"n"`
	P50Us float64 `json:"p50_us"`
	P99Us float64 `json:"p99_us"`
	MaxUs float64 `json:"max_us"`
}

func quantilesOf(times []time.Duration) *quantiles {
	slices.Sort(times)
	at := func(share float64) float64 { return float64(times[int(float64(len(times)-1)*share)]) / 1e3 }
	return &quantiles{N: len(times), P50Us: at(0.5), P99Us: at(0.99), MaxUs: at(1)}
}

// trials are the kinds of trials.
var trials = map[string]func(arguments) (result, error){
	"lookup":  lookup,
	"burst":   burst,
	"loop":    loop,
	"cold":    cold,
	"memory":  memory,
	"recency": recency,
}

// arguments are name=value, as both sides read them.
type arguments map[string]int

func parseArguments(pairs []string) (arguments, error) {
	a := arguments{}
	for _, pair := range pairs {
		name, text, _ := strings.Cut(pair, "=")
		value, err := strconv.Atoi(text)
		if err != nil {
			return nil, fmt.Errorf("%q is not name=number", pair)
		}
		a[name] = value
	}
	return a, nil
}

func (a arguments) get(name string, otherwise int) int {
	if value, ok := a[name]; ok {
		return value
	}
	return otherwise
}

// answer says which pods hold how many blocks.
func answer(scores []score) string {
	pods := make([]string, len(scores))
	slices.SortFunc(scores, func(a, b score) int {
		return slices.Index(podNames, a.Pod) - slices.Index(podNames, b.Pod)
	})
	for i, s := range scores {
		pods[i] = fmt.Sprintf("%d:%d", slices.Index(podNames, s.Pod), s.Blocks)
	}
	return strings.Join(pods, " ")
}

// lookup has threads ask in a loop beside nobody: first by the batch, then one by one.
func lookup(a arguments) (result, error) {
	h := newHotSet(a)
	x, err := newIndex(250_000, h.holders)
	if err != nil {
		return result{}, err
	}
	h.fill(x, a.get("filler", 200_000))
	var r result
	for _, prefix := range h.prefixes {
		r.Answers = append(r.Answers, answer(x.Score(prefix, nil)))
	}
	runtime.GC()
	batches, singles := a.get("batches", 5_000), a.get("singles", 30_000)
	var mu sync.Mutex
	var all []time.Duration
	var running sync.WaitGroup
	begin := time.Now()
	for t := range a.get("threads", 1) {
		running.Go(func() {
			var scores []score
			wrong := 0
			for range batches {
				for i := range 64 {
					if scores = x.Score(h.prefix(i+t), scores); len(scores) != h.holders {
						wrong++
					}
				}
			}
			looped := time.Since(begin)
			each := make([]time.Duration, singles)
			for i := range each {
				from := time.Now()
				scores = x.Score(h.prefix(i+t), scores)
				each[i] = time.Since(from)
				if !h.right(scores) {
					wrong++
				}
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, each...)
			r.LookupsPerS += float64(64*batches) / looped.Seconds()
			r.Wrong += wrong
		})
	}
	running.Wait()
	r.Latency = quantilesOf(all)
	return r, nil
}

// A reading is one reader's part in a burst.
type reading struct {
	latency, service time.Duration
	right            bool
}

// burst releases readers at one moment, again and again, beside writers.
func burst(a arguments) (result, error) {
	readers, bursts := a.get("readers", 64), a.get("bursts", 8)
	period := time.Duration(a.get("period_ms", 250)) * time.Millisecond
	h := newHotSet(a)
	x, err := newStore(a, 250_000, h.holders)
	if err != nil {
		return result{}, err
	}
	h.fill(x, a.get("filler", 150_000))
	readings := make([]reading, readers*bursts)
	buffers := make([][]score, len(readings))
	for i := range buffers {
		buffers[i] = make([]score, 0, h.holders)
	}
	runtime.GC()
	w := startWriters(x, h, a.get("events", 2_000))
	var late []time.Duration
	var running sync.WaitGroup
	for n := range bursts {
		intended := w.begin.Add(time.Duration(n+1) * period)
		time.Sleep(time.Until(intended) - period/2)
		gate := make(chan struct{})
		var ready sync.WaitGroup
		ready.Add(readers)
		for i := range readers {
			running.Go(func() {
				prompt, scores := h.prefix(n+i), buffers[n*readers+i]
				ready.Done()
				<-gate
				begin := time.Now()
				scores = x.Score(prompt, scores)
				end := time.Now()
				readings[n*readers+i] = reading{end.Sub(intended), end.Sub(begin), h.right(scores)}
			})
		}
		ready.Wait()
		time.Sleep(time.Until(intended) - 2*time.Millisecond)
		for time.Now().Before(intended) {
			runtime.Gosched()
		}
		late = append(late, time.Since(intended))
		close(gate)
	}
	running.Wait()
	r := result{Events: w.stop(), ReleasedLate: quantilesOf(late)}
	var latency, service []time.Duration
	for _, one := range readings {
		latency = append(latency, one.latency)
		service = append(service, one.service)
		if !one.right {
			r.Wrong++
		}
	}
	r.Latency, r.Service = quantilesOf(latency), quantilesOf(service)
	return r, nil
}

// loop has readers ask in a loop beside writers.
func loop(a arguments) (result, error) {
	h := newHotSet(a)
	x, err := newIndex(250_000, h.holders)
	if err != nil {
		return result{}, err
	}
	h.fill(x, a.get("filler", 150_000))
	runtime.GC()
	w := startWriters(x, h, a.get("events", 2_000))
	var stopped atomic.Bool
	var mu sync.Mutex
	var all []time.Duration
	var r result
	var running sync.WaitGroup
	begin := time.Now()
	for first := range a.get("readers", 64) {
		running.Go(func() {
			each := make([]time.Duration, 0, 200_000)
			var scores []score
			wrong := 0
			for i := first; !stopped.Load(); runtime.Gosched() {
				for range 16 {
					from := time.Now()
					scores = x.Score(h.prefix(i), scores)
					each = append(each, time.Since(from))
					if i++; len(scores) != h.holders {
						wrong++
					}
				}
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, each...)
			r.Wrong += wrong
		})
	}
	time.Sleep(time.Duration(a.get("ms", 700)) * time.Millisecond)
	stopped.Store(true)
	elapsed := time.Since(begin)
	running.Wait()
	r.Events = w.stop()
	r.LookupsPerS = float64(len(all)) / elapsed.Seconds()
	r.Latency = quantilesOf(all)
	return r, nil
}

// full returns an index filled with chains of some blocks, each on as many pods, and the
// number of chains.
func full(keys, blocks, holders int) (*index, int, error) {
	x, err := newIndex(keys, holders)
	if err != nil {
		return nil, 0, err
	}
	for n := range keys / blocks {
		chain := newChain(uint64(n*blocks), blocks)
		for i := range holders {
			x.Add(chain, podNames[(n%hotPrefixes*podCount/hotPrefixes+i)%podCount])
		}
	}
	return x, keys / blocks, nil
}

// cold asks for each chain of a full index once, in random order: no cache holds them.
func cold(a arguments) (result, error) {
	blocks, holders := a.get("blocks", 263), a.get("holders", 10)
	x, count, err := full(a.get("keys", 1_000_000), blocks, holders)
	if err != nil {
		return result{}, err
	}
	order := make([]int, count)
	for i := range order {
		order[i] = i
	}
	rnd := random(1)
	for i := count - 1; i > 0; i-- {
		j := rnd.below(i + 1)
		order[i], order[j] = order[j], order[i]
	}
	runtime.GC()
	var r result
	var each []time.Duration
	var scores []score
	right := &hotSet{holders: holders}
	for batch := range slices.Chunk(order, 16) {
		var prompts [][]uint64
		for _, n := range batch {
			prompts = append(prompts, newChain(uint64(n*blocks), blocks))
		}
		for _, prompt := range prompts {
			from := time.Now()
			scores = x.Score(prompt, scores)
			each = append(each, time.Since(from))
			right.prefixes[0] = prompt
			if !right.right(scores) {
				r.Wrong++
			}
		}
	}
	r.Latency = quantilesOf(each)
	return r, nil
}

func memory(a arguments) (result, error) {
	holders := a.get("holders", 10)
	debug.FreeOSMemory()
	before := rssBytes()
	x, count, err := full(a.get("keys", 1_000_000), fillerBlocks, holders)
	if err != nil {
		return result{}, err
	}
	debug.FreeOSMemory()
	r := result{BytesPerBlock: float64(rssBytes()-before) / float64(count*fillerBlocks)}
	if len(x.Score(newChain(0, fillerBlocks), nil)) != holders {
		r.Wrong++
	}
	return r, nil
}

// rssBytes returns the memory that the process has of the machine's.
func rssBytes() int64 {
	statm, _ := os.ReadFile("/proc/self/statm")
	var size, resident int64
	fmt.Sscan(string(statm), &size, &resident)
	return resident * int64(os.Getpagesize())
}
