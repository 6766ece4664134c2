// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"math/rand/v2"
	"slices"
	"time"
)

// The synthetic trace: popular conversations that grow with each turn, and prompts that
// never come again. Of 4,000 requests an exact LRU of 10,000 keys finds about 0.37 of
// all blocks usable, one of 40,000 keys 0.78, one of 80,000 keys 0.88, and one that
// forgets nothing 0.90.
const (
	conversations    = 400
	zipfExponent     = 1.05 // popularity of conversation k is (zipfOffset + k) ^ -zipfExponent
	zipfOffset       = 4
	firstTurnBlocks  = 60
	minTurnBlocks    = 8
	maxTurnBlocks    = 40
	maxBlocks        = 1_500 // a conversation longer than that begins anew
	oneShotShare     = 0.03  // of all requests
	minOneShotBlocks = 200
	maxOneShotBlocks = 1_000
	interval         = 100 * time.Millisecond
)

// Synthetic makes up a trace of n requests. Equal seeds give equal traces.
func Synthetic(seed uint64, n int) []Request {
	random := rand.New(rand.NewPCG(seed, 0))
	zipf := rand.NewZipf(random, zipfExponent, zipfOffset, conversations-1)
	blocks := uint32(0)
	grow := func(chain []uint64, n int) []uint64 {
		for range n {
			chain = append(chain, mix(0, blocks))
			blocks++
		}
		return chain
	}
	between := func(low, high int) int { return low + random.IntN(high-low+1) }

	sessions := conversations
	session := make([]int, conversations)
	chains := make([][]uint64, conversations)
	for i := range chains {
		session[i] = i
		chains[i] = grow(nil, firstTurnBlocks)
	}
	requests := make([]Request, n)
	for i := range requests {
		at := time.Duration(i) * interval
		if random.Float64() < oneShotShare {
			requests[i] = Request{at, grow(nil, between(minOneShotBlocks, maxOneShotBlocks)), sessions}
			sessions++
			continue
		}
		c := zipf.Uint64()
		if len(chains[c]) > maxBlocks {
			session[c], chains[c] = sessions, grow(nil, firstTurnBlocks)
			sessions++
		}
		chains[c] = grow(chains[c], between(minTurnBlocks, maxTurnBlocks))
		requests[i] = Request{at, slices.Clone(chains[c]), session[c]}
	}
	return requests
}
