// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

func newIndex(t testing.TB, capacity, maxPods int) *Index[string] {
	t.Helper()
	x, err := New[string](Config{Capacity: capacity, MaxPodsPerKey: maxPods})
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// chain returns n keys that no other first key gives.
func chain(first uint64, n int) []uint64 {
	keys := make([]uint64, n)
	for i := range keys {
		keys[i] = first<<32 | uint64(i)
	}
	return keys
}

func scores(x *Index[string], keys []uint64) map[string]int {
	found := map[string]int{}
	for _, s := range x.Score(keys, nil) {
		found[s.Pod] = s.Blocks
	}
	return found
}

func contents(x *Index[string], keys []uint64) map[uint64][]string {
	found := map[uint64][]string{}
	for i, pods := range x.Lookup(keys, nil) {
		found[keys[i]] = slices.Sorted(slices.Values(pods))
	}
	return found
}

// check compares what the writers know of the index with what it says.
func check(t *testing.T, x *Index[string]) {
	t.Helper()
	refs := map[*podSet[string]]int{}
	live := 0
	for n := range x.keys.shards {
		s := &x.keys.shards[n]
		table := s.table.Load()
		held, used := 0, 0
		for i := range table.slots {
			w := word(table.slots[i].word.Load())
			if w != 0 {
				used++
			}
			if !w.held() {
				continue
			}
			held++
			set := x.sets.get(w)
			if set == nil || len(set.pods) == 0 || len(set.pods) > x.maxPods {
				t.Fatalf("slot %d of shard %d has set %v", i, n, set)
			}
			refs[set]++
		}
		if held != s.live || table != emptyTable && used != s.used {
			t.Fatalf("shard %d: %d held, %d used; it counts %d and %d", n, held, used, s.live, s.used)
		}
		live += held
	}
	if live != x.Len() || live > x.capacity {
		t.Fatalf("%d keys, Len %d, capacity %d", live, x.Len(), x.capacity)
	}
	if len(refs) != len(x.intern.byIDs) {
		t.Fatalf("%d sets in use, %d kept", len(refs), len(x.intern.byIDs))
	}
	inUse := map[string]bool{}
	for set, n := range refs {
		if set.refs != n {
			t.Fatalf("set %v has %d references, counts %d", set.pods, n, set.refs)
		}
		for _, pod := range set.pods {
			inUse[pod] = true
		}
	}
	if len(inUse) != len(x.intern.ids) {
		t.Fatalf("%d pods in use, %d kept", len(inUse), len(x.intern.ids))
	}
}

// TestIndexIsAMapOfSetsWhileItHasRoom compares it with a plain one after every step.
func TestIndexIsAMapOfSetsWhileItHasRoom(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			x := newIndex(t, 1<<16, 8)
			model := map[uint64]map[string]bool{}
			all := make([]uint64, 400)
			for i := range all {
				all[i] = random.Uint64N(500) // key 0 among them
			}
			for range 2_000 {
				at := random.IntN(len(all))
				keys := all[at:min(at+1+random.IntN(40), len(all))]
				pod := fmt.Sprint("pod", random.IntN(8))
				switch random.IntN(10) {
				case 0:
					x.Clear(pod)
					for key := range model {
						delete(model[key], pod)
					}
				case 1, 2, 3:
					for _, key := range keys {
						delete(model[key], pod)
						if got, want := x.Evict(key, pod), len(model[key]) > 0; got != want {
							t.Fatalf("Evict says that key %d is held: %v", key, got)
						}
					}
				default:
					x.Add(keys, pod)
					for _, key := range keys {
						if model[key] == nil {
							model[key] = map[string]bool{}
						}
						model[key][pod] = true
					}
				}
				maps.DeleteFunc(model, func(_ uint64, pods map[string]bool) bool { return len(pods) == 0 })
				compare(t, x, model, keys)
			}
			check(t, x)
			compareAll(t, x, model)
		})
	}
}

// compareAll compares what does not ask for a chain.
func compareAll(t *testing.T, x *Index[string], model map[uint64]map[string]bool) {
	t.Helper()
	all := map[uint64]map[string]bool{}
	for key, pods := range x.All() {
		all[key] = map[string]bool{}
		for _, pod := range pods {
			all[key][pod] = true
		}
	}
	if !maps.EqualFunc(all, model, maps.Equal) {
		t.Fatalf("All: got %v, want %v", all, model)
	}
	for key := range uint64(500) {
		for n := range 8 {
			pod := fmt.Sprint("pod", n)
			if x.Holds(key, pod) != model[key][pod] {
				t.Fatalf("Holds(%d, %s) is not %v", key, pod, model[key][pod])
			}
		}
	}
}

func compare(t *testing.T, x *Index[string], model map[uint64]map[string]bool, keys []uint64) {
	t.Helper()
	if x.Len() != len(model) {
		t.Fatalf("Len %d, want %d", x.Len(), len(model))
	}
	want := map[uint64][]string{}
	leading := map[string]int{}
	unbroken := true
	for i, key := range keys {
		if pods := model[key]; len(pods) > 0 {
			want[key] = slices.Sorted(maps.Keys(pods))
		}
		if i == 0 {
			for pod := range model[key] {
				leading[pod] = 0
			}
		}
		for pod, n := range leading {
			if n == i && unbroken && model[key][pod] {
				leading[pod]++
			}
		}
	}
	if got := contents(x, keys); !maps.EqualFunc(got, want, slices.Equal) {
		t.Fatalf("Lookup: got %v, want %v", got, want)
	}
	if got := scores(x, keys); !maps.Equal(got, leading) {
		t.Fatalf("Score: got %v, want %v", got, leading)
	}
}

func TestLookupKeepsThePodsAskedFor(t *testing.T) {
	x := newIndex(t, 100, 4)
	x.Add([]uint64{1, 2, 3}, "a", "b")
	x.Add([]uint64{2}, "c")
	x.Evict(2, "a")
	found := map[int][]string{}
	for i, pods := range x.Lookup([]uint64{1, 2, 3, 4}, func(pod string) bool { return pod != "b" }) {
		found[i] = slices.Clone(pods)
	}
	if want := map[int][]string{0: {"a"}, 1: {"c"}, 2: {"a"}}; !maps.EqualFunc(found, want, slices.Equal) {
		t.Fatalf("got %v, want %v", found, want)
	}
	for i := range x.Lookup([]uint64{1, 2, 3}, func(pod string) bool { return pod == "d" }) {
		t.Fatalf("key %d", i)
	}
}

func TestCapacityIsNeverExceededAndWhatIsLeftIsConsistent(t *testing.T) {
	for _, capacity := range []int{1, 2, 7, 128, 1000, 40_000} {
		t.Run(fmt.Sprint(capacity), func(t *testing.T) {
			random := rand.New(rand.NewPCG(uint64(capacity), 1))
			x := newIndex(t, capacity, 3)
			for range 3_000 {
				keys := chain(random.Uint64N(200), 1+random.IntN(60))
				pod := fmt.Sprint("pod", random.IntN(5))
				switch random.IntN(6) {
				case 0:
					x.Evict(keys[random.IntN(len(keys))], pod)
				case 1, 2:
					x.Score(keys, nil)
				default:
					x.Add(keys, pod)
				}
				if x.Len() > capacity {
					t.Fatalf("Len %d", x.Len())
				}
			}
			check(t, x)
		})
	}
}

func TestPodsThatAddedNothingForLongestGiveWay(t *testing.T) {
	x := newIndex(t, 100, 2)
	x.Add([]uint64{1}, "a")
	x.Add([]uint64{1}, "b")
	x.Add([]uint64{9}, "a")
	x.Add([]uint64{1}, "c")
	if got := contents(x, []uint64{1})[1]; !slices.Equal(got, []string{"a", "c"}) {
		t.Fatalf("got %v", got)
	}
	check(t, x)
}

func TestSetsAndPodsAreReclaimed(t *testing.T) {
	x := newIndex(t, 50, 4)
	for round := range uint64(3_000) {
		x.Add(chain(round, 5), fmt.Sprint("pod", round), fmt.Sprint("pod", round+1))
	}
	check(t, x)
	if chunks := len(*x.sets.chunks.Load()); chunks != 1 {
		t.Fatalf("%d chunks for at most 51 sets", chunks)
	}
	for round := range uint64(3_001) {
		x.Clear(fmt.Sprint("pod", round))
	}
	if x.Len() != 0 || len(x.intern.ids) != 0 || len(x.intern.byIDs) != 0 {
		t.Fatalf("left: %d keys, %d pods, %d sets", x.Len(), len(x.intern.ids), len(x.intern.byIDs))
	}
}

func TestScoreAllocatesNothing(t *testing.T) {
	x := newIndex(t, 1<<16, 10)
	keys := chain(1, 263)
	for pod := range 10 {
		x.Add(keys[:100+10*pod], fmt.Sprint("pod", pod))
	}
	buffer := make([]PodScore[string], 0, 10)
	if n := testing.AllocsPerRun(100, func() { x.Score(keys, buffer) }); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

func TestNewRefusesBoundsThatHoldNothing(t *testing.T) {
	for _, config := range []Config{{0, 1}, {-1, 1}, {1, 0}, {maxCapacity + 1, 1}} {
		if _, err := New[int](config); err == nil {
			t.Errorf("%+v: no error", config)
		}
	}
}

func FuzzIndex(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
	f.Fuzz(func(t *testing.T, steps []byte) {
		x := newIndex(t, 16, 3)
		for i := 0; i+2 < len(steps); i += 3 {
			keys := chain(uint64(steps[i+1]%8), 1+int(steps[i+1]/8))
			pod := string('a' + rune(steps[i+2]%5))
			switch steps[i] % 4 {
			case 0:
				x.Evict(keys[len(keys)-1], pod)
			case 1:
				x.Clear(pod)
			case 2:
				x.Score(keys, nil)
			default:
				x.Add(keys, pod)
				held := min(len(keys), 16)
				if got := scores(x, keys)[pod]; got != held {
					t.Fatalf("%d of %d blocks after Add", got, held)
				}
			}
			check(t, x)
		}
	})
}

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
