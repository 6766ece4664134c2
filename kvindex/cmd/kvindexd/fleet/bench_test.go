// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
)

// An encoded batch says that blocks of these hashes are stored and others removed, one
// event for the stored and one for each removed block, as vLLM 0.33 has them.
func batch(stored, removed [][32]byte, tokens int) []byte {
	b := msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 3), 1.5)
	events := len(removed)
	if len(stored) > 0 {
		events++
	}
	b = msgp.AppendArrayHeader(b, uint32(events))
	if len(stored) > 0 {
		b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 9), "type"), "BlockStored")
		b = appendRawHashes(b, stored)
		b = msgp.AppendBytes(msgp.AppendString(b, "parent_block_hash"), make([]byte, 32))
		b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(tokens*len(stored)))
		for n := range tokens * len(stored) {
			b = msgp.AppendUint32(b, uint32(n*7919)%150_000)
		}
		b = msgp.AppendInt(msgp.AppendString(b, "block_size"), tokens)
		b = msgp.AppendNil(msgp.AppendString(b, "lora_id"))
		b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
		b = msgp.AppendNil(msgp.AppendString(b, "lora_name"))
		b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
	}
	for _, hash := range removed {
		b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 4), "type"), "BlockRemoved")
		b = appendRawHashes(b, [][32]byte{hash})
		b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
		b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
	}
	return msgp.AppendInt(b, 0)
}

func appendRawHashes(b []byte, hashes [][32]byte) []byte {
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(len(hashes)))
	for _, hash := range hashes {
		b = msgp.AppendBytes(b, hash[:])
	}
	return b
}

func someHashes(random *rand.ChaCha8, n int) [][32]byte {
	found := make([][32]byte, n)
	for i := range found {
		random.Read(found[i][:])
	}
	return found
}

// BenchmarkTake: what an event costs. A cache of 16,000 blocks is full, so each block that
// is stored removes one.
func BenchmarkTake(b *testing.B) {
	for _, perStored := range []int{1, 16} {
		b.Run(fmt.Sprintf("blocks per stored event=%d", perStored), func(b *testing.B) {
			f := newFleet(b, 4_000_000, 1)
			one := f.instances[0]
			random := rand.NewChaCha8([32]byte{})
			all := someHashes(random, 16_000)
			var batches [][]byte
			events := 0
			for n := 0; n < len(all); n += perStored {
				stored := all[n : n+perStored]
				removed := all[(n+len(all)/2)%len(all):][:perStored]
				batches = append(batches, batch(stored, removed, 16))
				events += 1 + len(removed)
			}
			b.ReportAllocs()
			b.ResetTimer()
			number, taken := uint64(0), 0
			for b.Loop() {
				one.Take(number, batches[number%uint64(len(batches))])
				number++
				taken += events / len(batches)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(taken), "ns/event")
			b.ReportMetric(float64(taken)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

// BenchmarkLookup: a prompt of 33,000 ids that 64 instances hold to different depths, while
// 40 of them write 100 batches a second each.
func BenchmarkLookup(b *testing.B) {
	const instances, writers, perSecond = 64, 40, 100
	for _, tokens := range []int{16, 128} {
		b.Run(fmt.Sprintf("block tokens=%d", tokens), func(b *testing.B) {
			f := newFleet(b, 4_000_000, instances)
			ids := make([]uint32, 33_000)
			for i := range ids {
				ids[i] = rand.Uint32N(150_000)
			}
			holdPrompt(f, ids, tokens)
			stop := make(chan struct{})
			var writing sync.WaitGroup
			for n := range writers {
				writing.Go(func() { write(f.instances[n], tokens, perSecond, stop) })
			}
			reader := f.NewReader()
			var took []time.Duration
			for b.Loop() {
				began := time.Now()
				holdings := reader.Lookup(&Query{IDs: ids})
				took = append(took, time.Since(began))
				if got := holdings[instances-1].Blocks; got != (len(ids)-1)/tokens {
					b.Fatal(got)
				}
				time.Sleep(time.Millisecond) // as a router has other things to do
			}
			close(stop)
			writing.Wait()
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-us")
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-us")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// holdPrompt makes each instance hold more of a prompt than the one before.
func holdPrompt(f *Fleet, ids []uint32, tokens int) {
	h := blockhash.New(blockhash.SHA256)
	hash := h.Seed("0")
	var chain [][32]byte
	for start := 0; start+tokens <= len(ids); start += tokens {
		hash = h.Block(&hash, ids[start:start+tokens], nil)
		chain = append(chain, [32]byte(hash.Bytes()))
	}
	for n, one := range f.instances {
		one.Take(0, rootBatch(chain[0], ids[:tokens]))
		one.Take(1, batch(chain[1:max(1, len(chain)*(n+1)/len(f.instances))], nil, tokens))
		one.Connected()
	}
}

func rootBatch(hash [32]byte, ids []uint32) []byte {
	b := msgp.AppendArrayHeader(msgp.AppendNil(msgp.AppendArrayHeader(nil, 2)), 1)
	b = msgp.AppendString(msgp.AppendArrayHeader(b, 5), "BlockStored")
	b = msgp.AppendBytes(msgp.AppendArrayHeader(b, 1), hash[:])
	b = msgp.AppendArrayHeader(msgp.AppendNil(b), uint32(len(ids)))
	for _, id := range ids {
		b = msgp.AppendUint32(b, id)
	}
	return msgp.AppendInt(b, len(ids))
}

// write stores 16 blocks and removes 16 others in each batch.
func write(to *Instance, tokens, perSecond int, stop chan struct{}) {
	random := rand.NewChaCha8([32]byte{byte(to.number)})
	tick := time.NewTicker(time.Second / time.Duration(perSecond))
	defer tick.Stop()
	var earlier [][32]byte
	for number := uint64(2); ; number++ {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		now := someHashes(random, 16)
		to.Take(number, batch(now, earlier, tokens))
		earlier = now
	}
}

// BenchmarkMemory: what a block takes, with its place in the index: 8 instances of
// 125,000 blocks each, a tenth of them the same everywhere.
func BenchmarkMemory(b *testing.B) {
	const each, shared = 125_000, 12_500
	for b.Loop() {
		before := heap()
		f := newFleet(b, 4_000_000, 8)
		common := someHashes(rand.NewChaCha8([32]byte{255}), shared)
		for n, one := range f.instances {
			own := someHashes(rand.NewChaCha8([32]byte{byte(n)}), each-shared)
			for number, hashes := range slices.Collect(slices.Chunk(append(common, own...), 50)) {
				one.Take(uint64(number), batch(hashes, nil, 1))
			}
		}
		memo := 1 << 20 / 136 * 8
		b.ReportMetric(float64(heap()-before-memo)/float64(f.Blocks()), "B/block")
		runtime.KeepAlive(f)
	}
}

func heap() int {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int(stats.HeapAlloc)
}
