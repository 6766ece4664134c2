// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

const (
	chainBlocks = 263 // of a prompt of llm-d-kv-cache's pull request 562
	coldKeys    = 4_000_000
)

// filled returns an index with chains of the same ten pods, and the chains.
func filled(b *testing.B, keys int) (*Index[string], [][]uint64) {
	b.Helper()
	x := newIndex(b, keys+chainBlocks, 10)
	pods := make([]string, 10)
	for i := range pods {
		pods[i] = fmt.Sprint("pod", i)
	}
	random := rand.New(rand.NewPCG(1, 2))
	var chains [][]uint64
	for x.Len() < keys {
		keys := make([]uint64, chainBlocks)
		for i := range keys {
			keys[i] = random.Uint64()
		}
		x.Add(keys, pods...)
		chains = append(chains, keys)
	}
	random.Shuffle(len(chains), func(i, j int) { chains[i], chains[j] = chains[j], chains[i] })
	return x, chains
}

func BenchmarkScoreHot(b *testing.B) {
	x, chains := filled(b, 100*chainBlocks)
	scores := make([]PodScore[string], 0, 10)
	for b.Loop() {
		scores = x.Score(chains[0], scores)
	}
}

func BenchmarkScoreCold(b *testing.B) {
	x, chains := filled(b, coldKeys)
	scores := make([]PodScore[string], 0, 10)
	i := 0
	for b.Loop() {
		scores = x.Score(chains[i], scores)
		if i++; i == len(chains) {
			i = 0
		}
	}
}

// BenchmarkFloor loads as many independent random slots as a chain has blocks, from as
// much memory as a table for the cold keys has.
func BenchmarkFloor(b *testing.B) {
	slots := make([]slot, coldKeys*100/65)
	for i := range slots {
		slots[i].key.Store(uint64(i))
	}
	random := rand.New(rand.NewPCG(1, 2))
	places := make([]uint32, 1<<22)
	for i := range places {
		places[i] = random.Uint32N(uint32(len(slots)))
	}
	sum, at := uint64(0), 0
	for b.Loop() {
		if at+chainBlocks > len(places) {
			at = 0
		}
		for _, place := range places[at : at+chainBlocks] {
			sum += slots[place].key.Load()
		}
		at += chainBlocks
	}
	_ = sum
}

func BenchmarkAddFresh(b *testing.B) {
	x, _ := filled(b, 200_000)
	keys := make([]uint64, 16)
	next := uint64(0)
	for b.Loop() {
		for i := range keys {
			next++
			keys[i] = next * 0x9E3779B97F4A7C15
		}
		x.Add(keys, "pod1")
	}
}
