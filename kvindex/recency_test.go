// SPDX-License-Identifier: Apache-2.0

package kvindex

import "testing"

func TestOfTwoKeysTheOneReadLastStays(t *testing.T) {
	x := newIndex(t, 2, 10)
	x.Add([]uint64{10}, "a")
	x.Add([]uint64{20}, "a")
	x.Score([]uint64{10}, nil)
	x.Add([]uint64{30}, "a")
	if got := contents(x, []uint64{10, 20, 30}); len(got) != 2 || got[10] == nil || got[30] == nil {
		t.Fatalf("left: %v", got)
	}
}

// TestHotMultiTurnPrefix: a conversation is admitted once and then only read, while
// one-shot prompts of eight times the capacity pass by.
func TestHotMultiTurnPrefix(t *testing.T) {
	x := newIndex(t, 8192, 10)
	hot := chain(1, 263)
	x.Add(hot, "a")
	for turn := range uint64(40) {
		if got := scores(x, hot)["a"]; got != len(hot) {
			t.Fatalf("turn %d: %d of %d blocks left", turn, got, len(hot))
		}
		x.Add(chain(100+turn, 1024), "b")
		if x.Len() > 8192 {
			t.Fatalf("Len %d", x.Len())
		}
	}
	if got := scores(x, hot)["a"]; got != len(hot) {
		t.Fatalf("%d of %d blocks left", got, len(hot))
	}
}

func TestEvictionEatsAChainFromItsTail(t *testing.T) {
	x := newIndex(t, 1000, 10)
	old := chain(1, 600)
	x.Add(old, "a")
	x.Add(chain(2, 700), "b")
	held := contents(x, old)
	if got := scores(x, old)["a"]; got != 300 || len(held) != 300 {
		t.Fatalf("%d leading blocks of the %d left", got, len(held))
	}
}

func TestTheQueueOfKeysIsBoundedByWhatIsHeld(t *testing.T) {
	x := newIndex(t, 1_000, 4)
	still := chain(1, 300)
	x.Add(still, "a")
	for round := range uint64(20_000) {
		keys := chain(2+round, 4)
		x.Add(keys, "a")
		for _, key := range keys {
			x.Evict(key, "a")
		}
		if x.queue.entries > 3*minQueueLimit || len(x.queue.buckets) > maxBuckets+1 {
			t.Fatalf("round %d: %d keys queued in %d epochs", round, x.queue.entries, len(x.queue.buckets))
		}
	}
	check(t, x)
	x.Add(chain(1<<30, 1_000), "b")
	if got := len(contents(x, still)); got != 0 {
		t.Fatalf("%d keys outlived %d newer ones", got, 1_000)
	}
}
