// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/scheduling"
)

// The load is that of kvbench's first burst (kvindex/bench/trial.go): 64 readers ask at
// once for prompts of 263 blocks, while 40 pods publish.
const (
	readers        = 64
	promptBlocks   = 263
	pods           = 40
	podsPerPrompt  = 10
	hotPrompts     = 8
	eventBlocks    = 16
	eventsPerS     = 2_000
	capacity       = 200_000
	period         = 250 * time.Millisecond
	vllmBlock      = 16
	defaultWorkers = 4
)

// BenchmarkBurst measures a scorer's whole answer, from the moment a burst is released to
// the scores: of 64 answers in each iteration, the median and the 99th percentile.
func BenchmarkBurst(b *testing.B) {
	for _, one := range kinds {
		b.Run(one.name, func(b *testing.B) { burst(b, one) })
	}
}

func burst(b *testing.B, of kind) {
	scorer := of.make(b, capacity, defaultWorkers, vllmBlock)
	load := newLoad(b, scorer)
	load.fill()
	writing := load.write()
	var took []time.Duration
	least := promptBlocks
	next := time.Now().Add(period)
	b.ResetTimer()
	for b.Loop() {
		time.Sleep(time.Until(next))
		latencies, blocks := load.release(next)
		took, least = append(took, latencies...), min(least, blocks)
		next = next.Add(period)
	}
	b.StopTimer()
	sent := writing()
	behind := time.Now()
	settle(b, load.to, vllmBlock, scorer)
	slices.Sort(took)
	at := func(share float64) float64 { return took[int(share*float64(len(took)-1))].Seconds() * 1e6 }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(at(0.5), "p50-µs")
	b.ReportMetric(at(0.99), "p99-µs")
	b.ReportMetric(sent, "events/s")
	b.ReportMetric(time.Since(behind).Seconds()*1e3, "behind-ms")
	b.ReportMetric(float64(least)/promptBlocks, "coverage")
}

// A load is prompts that everybody asks for, and the pods that hold them.
type load struct {
	scorer    contestant
	to        *publisher
	names     []string
	endpoints []scheduling.Endpoint
	prompts   [hotPrompts][]uint32
	number    uint32 // of the next token id that nobody has used
}

func newLoad(b *testing.B, scorer contestant) *load {
	b.Helper()
	l := &load{scorer: scorer, to: publish(b, scorer.endpoint)}
	for i := range pods {
		l.names = append(l.names, fmt.Sprintf("10.0.0.%d:8000", i+1))
	}
	l.endpoints = endpointsOf(b, l.names...)
	for i := range l.prompts {
		l.prompts[i] = l.fresh(promptBlocks)
	}
	settle(b, l.to, vllmBlock, scorer)
	return l
}

// fresh returns ids of blocks that are nowhere yet.
func (l *load) fresh(blocks int) []uint32 {
	ids := make([]uint32, blocks*vllmBlock)
	for i := range ids {
		ids[i] = l.number
		l.number++
	}
	return ids
}

// fill brings the index to its ceiling with blocks that nobody asks for, and adds the
// prompts last, so that eviction is live.
func (l *load) fill() {
	for n := range capacity / promptBlocks {
		l.store(n, l.fresh(promptBlocks), 0)
	}
	for i, prompt := range l.prompts {
		for n := range podsPerPrompt {
			l.store(holder(i, n), prompt, 0)
		}
	}
	settle(l.to.t, l.to, vllmBlock, l.scorer)
	// A worker each: the last event of one is no sign of the others'.
	time.Sleep(time.Second)
}

// holder returns the n-th of the pods that hold a prompt.
func holder(prompt, n int) int { return (prompt*pods/hotPrompts + n) % pods }

func (l *load) store(pod int, ids []uint32, from int) {
	l.to.send(l.names[pod%pods], l.to.stored(ids, from, vllmBlock, "GPU"))
}

// write publishes, at the stated rate, blocks that nobody has and as often blocks of the
// prompts once more. It returns what ends that and tells the rate.
func (l *load) write() (stop func() float64) {
	begin := time.Now()
	var stopped atomic.Bool
	var sent int
	var running sync.WaitGroup
	running.Go(func() {
		for ; !stopped.Load(); sent++ {
			time.Sleep(time.Until(begin.Add(time.Duration(sent) * time.Second / eventsPerS)))
			if sent%2 == 0 {
				l.store(sent/2, l.fresh(eventBlocks), 0)
				continue
			}
			prompt := sent / 2 % hotPrompts
			from := sent * eventBlocks % (promptBlocks - eventBlocks)
			ids := l.prompts[prompt][:(from+eventBlocks)*vllmBlock]
			l.store(holder(prompt, sent%podsPerPrompt), ids, from)
		}
	})
	return func() float64 {
		stopped.Store(true)
		running.Wait()
		return float64(sent) / time.Since(begin).Seconds()
	}
}

// release lets all readers ask at once. It returns how long after the intended moment each
// had its answer, and the fewest leading blocks that the best pod held.
func (l *load) release(intended time.Time) ([]time.Duration, int) {
	latencies := make([]time.Duration, readers)
	held := make([]int, readers)
	var running sync.WaitGroup
	for i := range latencies {
		prompt := l.prompts[i%hotPrompts]
		running.Go(func() {
			found := l.scorer.ask(l.to.t.Context(), prompt, model, l.endpoints)
			latencies[i] = time.Since(intended)
			for _, blocks := range found.blocks {
				held[i] = max(held[i], blocks)
			}
		})
	}
	running.Wait()
	return latencies, slices.Min(held)
}

const model = "model"

// A publisher sends what vLLM's engines would, to all who listen at some endpoints.
type publisher struct {
	t      testing.TB
	mu     sync.Mutex
	pub    zmq4.Socket
	number uint64
	asMaps bool // as vLLM 0.25 and later
}

func publish(t testing.TB, endpoints ...string) *publisher {
	t.Helper()
	p := &publisher{t: t, pub: zmq4.NewPub(context.Background())}
	for _, endpoint := range endpoints {
		if err := p.pub.Dial(endpoint); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { p.pub.Close() })
	return p
}

// send sends a batch of events as one pod's.
func (p *publisher) send(pod string, events ...any) {
	batch, err := msgpack.Marshal([]any{float64(time.Now().Unix()), events, 0})
	if err != nil {
		p.t.Fatal(err)
	}
	p.sendBatch(pod, batch)
}

func (p *publisher) sendBatch(pod string, batch []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	topic := fmt.Sprintf("kv@%s@%s", pod, model)
	number := binary.BigEndian.AppendUint64(nil, p.number)
	p.number++
	if err := p.pub.Send(zmq4.NewMsgFrom([]byte(topic), number, batch)); err != nil {
		p.t.Error(err)
	}
}

// event is one of vLLM's, of these fields: an array that begins with its type, or a map.
func (p *publisher) event(kind string, fields ...field) any {
	if p.asMaps {
		event := map[string]any{"type": kind}
		for _, one := range fields {
			event[one.name] = one.value
		}
		return event
	}
	event := []any{kind}
	for _, one := range fields {
		event = append(event, one.value)
	}
	return event
}

type field struct {
	name  string
	value any
}

// stored says that the blocks of a prompt from one on are cached.
func (p *publisher) stored(ids []uint32, from int, blockTokens int, medium string) any {
	hashes := hashesOf(ids, blockTokens)
	var parent any
	if from > 0 {
		parent = hashes[from-1]
	}
	whole := len(hashes) * blockTokens
	return p.event("BlockStored",
		field{"block_hashes", hashes[from:]}, field{"parent_block_hash", parent},
		field{"token_ids", ids[from*blockTokens : whole]}, field{"block_size", blockTokens},
		field{"lora_id", nil}, field{"medium", medium}, field{"lora_name", nil})
}

func (p *publisher) removed(hashes [][]byte, medium string) any {
	return p.event("BlockRemoved", field{"block_hashes", hashes}, field{"medium", medium})
}

func (p *publisher) cleared() any { return p.event("AllBlocksCleared") }

// hashesOf stands for vLLM's: of 32 bytes, each of the block and all before it.
func hashesOf(ids []uint32, blockTokens int) [][]byte {
	var hashes [][]byte
	var before []byte
	for start := 0; start+blockTokens <= len(ids); start += blockTokens {
		text := slices.Clone(before)
		for _, id := range ids[start : start+blockTokens] {
			text = binary.LittleEndian.AppendUint32(text, id)
		}
		sum := sha256.Sum256(text)
		before = sum[:]
		hashes = append(hashes, before)
	}
	return hashes
}

// A pod is the cache of one engine, as far as its events tell of it.
type pod struct {
	name string
	to   *publisher
	held map[string]string // the medium of each hash
}

func newPod(name string, to *publisher) *pod {
	return &pod{name, to, make(map[string]string)}
}

// act does one thing at random, and publishes what came of it.
func (p *pod) act(random *rand.Rand, prompts [][]uint32) {
	switch n := random.IntN(20); {
	case n == 0:
		clear(p.held)
		p.to.send(p.name, p.to.cleared())
	case n < 7:
		p.evict(random)
	default:
		p.store(random, prompts[random.IntN(len(prompts))])
	}
}

// store caches a prompt, or the beginning of it, from the first block that is not held.
func (p *pod) store(random *rand.Rand, prompt []uint32) {
	medium := []string{"GPU", "GPU", "GPU", "CPU"}[random.IntN(4)]
	prompt = prompt[:random.IntN(len(prompt)+1)]
	hashes := hashesOf(prompt, blockTokens)
	from := slices.IndexFunc(hashes, func(hash []byte) bool { return p.held[string(hash)] == "" })
	if from < 0 {
		return
	}
	for _, hash := range hashes[from:] {
		p.held[string(hash)] = medium
	}
	p.to.send(p.name, p.to.stored(prompt, from, blockTokens, medium))
}

// evict drops some of what is held, anywhere in its chains.
func (p *pod) evict(random *rand.Rand) {
	var events []any
	for hash, medium := range p.held {
		if random.IntN(6) == 0 {
			events = append(events, p.to.removed([][]byte{[]byte(hash)}, medium))
			delete(p.held, hash)
		}
	}
	if len(events) > 0 {
		p.to.send(p.name, events...)
	}
}
