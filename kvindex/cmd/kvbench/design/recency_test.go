// SPDX-License-Identifier: Apache-2.0

package design

import "testing"

// peeking is an exact LRU that does not count reads: what is gained by Peek alone. It is
// here for the checks of recency to fail on.
type peeking struct{ *exactLRU }

func newPeeking(t *testing.T, capacity int) Index {
	return peeking{open(t, "exact-lru", capacity, 10).(*exactLRU)}
}

func (x peeking) NewReader() Reader { return &peekingReader{x, walk{names: x.names}} }

type peekingReader struct {
	index peeking
	walk
}

func (r *peekingReader) Lookup(chain []uint64) {
	r.begin()
	for _, key := range chain {
		pods, ok := r.index.table.keys.Peek(key)
		if !ok || !r.next(pods) {
			break
		}
	}
	r.end()
}

// hotPrefix returns how much is left of a chain of 263 blocks that was added once and
// then read in 40 turns, each followed by 1,024 other keys, in an index of 8,192.
func hotPrefix(t *testing.T, x Index) int {
	hot := chain(1, 263)
	x.Add(hot, "a")
	reader := x.NewReader()
	for turn := range uint64(40) {
		reader.Lookup(hot)
		x.Add(chain(100+turn, 1_024), "b")
		if n := x.Len(); n > 8_192 {
			t.Errorf("turn %d: Len %d", turn, n)
		}
	}
	return prefix(x, hot)
}

// Otter does not promise recency, and loses most of the chain.
func TestAHotMultiTurnPrefixStaysWhole(t *testing.T) {
	forEach(t, func(t *testing.T, name string) {
		if name == "otter" {
			t.Skip("evicts by frequency")
		}
		if got := hotPrefix(t, open(t, name, 8_192, 10)); got != 263 {
			t.Errorf("%d of 263 blocks left", got)
		}
	})
}

func TestWithoutCountingReadsAHotPrefixIsLost(t *testing.T) {
	if got := hotPrefix(t, newPeeking(t, 8_192)); got != 0 {
		t.Errorf("%d of 263 blocks left: the check cannot fail", got)
	}
}

// readKeyStays reports whether, of two keys in an index of two, the one read last stays
// and the other goes when a third is added.
func readKeyStays(x Index) bool {
	x.Add([]uint64{10}, "a")
	x.Add([]uint64{20}, "a")
	prefix(x, []uint64{10})
	x.Add([]uint64{30}, "a")
	return prefix(x, []uint64{10}) == 1 && prefix(x, []uint64{20}) == 0
}

func TestOfTwoKeysTheOneReadLastStays(t *testing.T) {
	forEach(t, func(t *testing.T, name string) {
		switch name {
		case "otter":
			t.Skip("evicts by frequency")
		case "sharded":
			t.Skip("two keys are in two shards, neither of which has a choice")
		}
		if !readKeyStays(open(t, name, 2, 10)) {
			t.Error("it went, or the other stayed")
		}
	})
}

func TestWithoutCountingReadsTheOneReadLastGoes(t *testing.T) {
	if readKeyStays(newPeeking(t, 2)) {
		t.Error("it stayed: the check cannot fail")
	}
}
