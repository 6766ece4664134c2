// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
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
	inRun := map[*run[string]]int{}
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
			if p := table.place(i); p.run() != 0 {
				inRun[checkPlace(t, x, table.slots[i].key.Load(), p, set)]++
			}
		}
		if held != s.live || table != emptyTable && used != s.used {
			t.Fatalf("shard %d: %d held, %d used; it counts %d and %d", n, held, used, s.live, s.used)
		}
		live += held
	}
	checkRuns(t, x, inRun)
	if live != x.Len() || live > x.capacity {
		t.Fatalf("%d keys, Len %d, capacity %d", live, x.Len(), x.capacity)
	}
	if len(refs) != len(x.intern.byIDs) {
		t.Fatalf("%d sets in use, %d kept", len(refs), len(x.intern.byIDs))
	}
	keys := map[string]int{}
	for set, n := range refs {
		if set.refs != n {
			t.Fatalf("set %v has %d references, counts %d", set.pods, n, set.refs)
		}
		for _, pod := range set.pods {
			keys[pod] += n
		}
	}
	for pod, n := range keys {
		if got := x.Count(pod); got != n {
			t.Fatalf("%s holds %d keys, counts %d", pod, n, got)
		}
	}
	if len(keys) != len(x.intern.ids) {
		t.Fatalf("%d pods in use, %d kept", len(keys), len(x.intern.ids))
	}
}

// checkPlace returns the run of a key after a look at what it says of the key.
func checkPlace(t *testing.T, x *Index[string], key uint64, p place, set *podSet[string]) *run[string] {
	t.Helper()
	r := x.runs.at(p.run()).Load()
	if r == nil || p.offset() >= len(r.keys) || r.keys[p.offset()] != key {
		t.Fatalf("key %d is not at %d of run %d: %v", key, p.offset(), p.run(), r)
	}
	if got := setsOf(r)[p.offset()]; got != set {
		t.Fatalf("key %d has set %v, in its run %v", key, set, got)
	}
	return r
}

// checkRuns checks the runs against how many keys say that they are in each.
func checkRuns(t *testing.T, x *Index[string], keys map[*run[string]]int) {
	t.Helper()
	if got := int(x.runs.unused) - 1 - len(x.runs.free); got != len(keys) {
		t.Fatalf("%d runs with keys, %d kept", len(keys), got)
	}
	for r, n := range keys {
		sets := setsOf(r)
		holes := 0
		for i, set := range sets {
			if set == nil {
				holes++
			} else if i > 0 && i%keysPerStamp == 0 && r.stamps[i/keysPerStamp].Load() > x.queue.epoch {
				t.Fatalf("keys of run %d were read in the future", r.index)
			}
		}
		if len(sets) != len(r.keys) || n != int(r.live) || n != len(sets)-holes || 2*n < len(sets)-1 {
			t.Fatalf("run %d of %d keys has %d, %d holes, counts %d", r.index, len(r.keys), n, holes, r.live)
		}
	}
}

// setsOf returns the set of each key of a run.
func setsOf(r *run[string]) []*podSet[string] {
	var sets []*podSet[string]
	var last *podSet[string]
	for i, s := range *r.segments.Load() {
		if s.end <= len(sets) || i > 0 && s.set == last {
			panic(fmt.Sprintf("segment %d of run %d is empty, or one with the one before it", i, r.index))
		}
		sets = append(sets, slices.Repeat([]*podSet[string]{s.set}, s.end-len(sets))...)
		last = s.set
	}
	return sets
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
					withdraw(model, pod, slices.Collect(maps.Keys(model))...)
				case 1, 2, 3:
					for _, key := range keys {
						withdraw(model, pod, key)
						if got, want := x.Evict(key, pod), len(model[key]) > 0; got != want {
							t.Fatalf("Evict says that key %d is held: %v", key, got)
						}
					}
				default:
					x.Add(keys, pod)
					add(model, pod, keys)
				}
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

// TestCapacityIsNeverExceededAndWhatIsLeftIsExact compares it with a plain map that
// drops what the index says it dropped: that must be as much as had no room.
func TestCapacityIsNeverExceededAndWhatIsLeftIsExact(t *testing.T) {
	for _, capacity := range []int{1, 2, 7, 128, 1000, 40_000} {
		t.Run(fmt.Sprint(capacity), func(t *testing.T) {
			random := rand.New(rand.NewPCG(uint64(capacity), 1))
			x := newIndex(t, capacity, 5)
			model := map[uint64]map[string]bool{}
			for step := range 3_000 {
				keys := chain(random.Uint64N(50), 1+random.IntN(120))
				keys = keys[random.IntN(len(keys)):]
				pod := fmt.Sprint("pod", random.IntN(5))
				switch random.IntN(12) {
				case 0:
					if random.IntN(20) == 0 {
						x.Clear(pod)
						withdraw(model, pod, slices.Collect(maps.Keys(model))...)
					}
				case 1:
					key := keys[random.IntN(len(keys))]
					x.Evict(key, pod)
					withdraw(model, pod, key)
				case 2, 3:
					for _, key := range slices.Backward(keys) {
						x.Evict(key, pod)
					}
					withdraw(model, pod, keys...)
				case 4, 5, 6:
					x.Score(keys, nil)
				default:
					add(model, pod, keys)
					x.Add(keys, pod)
				}
				if want := min(capacity, len(model)); x.Len() != want {
					t.Fatalf("Len %d, not %d", x.Len(), want)
				}
				dropped(x, model, keys, pod)
				compare(t, x, model, keys)
				if step%100 == 0 {
					check(t, x)
				}
			}
			check(t, x)
		})
	}
}

func add(model map[uint64]map[string]bool, pod string, keys []uint64) {
	for _, key := range keys {
		if model[key] == nil {
			model[key] = map[string]bool{}
		}
		model[key][pod] = true
	}
}

func withdraw(model map[uint64]map[string]bool, pod string, keys ...uint64) {
	for _, key := range keys {
		if delete(model[key], pod); len(model[key]) == 0 {
			delete(model, key)
		}
	}
}

// dropped takes out of a model what an index over its capacity does not hold. Pods are
// dropped with their key only; then the key may have come again with the pod just added.
func dropped(x *Index[string], model map[uint64]map[string]bool, keys []uint64, pod string) {
	if len(model) <= x.capacity {
		return
	}
	held := map[uint64][]string{}
	for key, pods := range x.All() {
		held[key] = pods
	}
	maps.DeleteFunc(model, func(key uint64, _ map[string]bool) bool { return held[key] == nil })
	for _, key := range keys {
		if slices.Equal(held[key], []string{pod}) {
			model[key] = map[string]bool{pod: true}
		}
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

func TestScoreOfPodsAtDifferentDepths(t *testing.T) {
	keys := chain(1, 2*minLinked)
	for _, pods := range []int{1, 40, 64, 65, 200, 1_100} {
		x := newIndex(t, len(keys), pods)
		want := map[string]int{}
		var holders []string
		for n := range pods {
			pod := fmt.Sprint("pod ", n)
			want[pod] = 1 + n*7%len(keys)
			holders = append(holders, pod)
		}
		for n := range keys {
			holders = slices.DeleteFunc(holders, func(pod string) bool { return want[pod] <= n })
			x.Add(keys[n:n+1], holders...)
		}
		x.Add(keys[1:], "late") // without the first block it has nothing
		for range 2 {           // block by block, and as a run
			if got := scores(x, keys); !maps.Equal(got, want) {
				t.Errorf("%d pods: %v, want %v", pods, got, want)
			}
		}
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

func pieces(x *Index[string], keys []uint64) int {
	walk := x.walk(keys)
	for n := 0; n < len(keys); {
		part := walk.next()
		n += part.end - part.begin
	}
	return walk.pieces
}

func TestAChainIsFoundInOnePieceHoweverItCame(t *testing.T) {
	keys := chain(1, maxRun)
	for name, came := range map[string]func(x *Index[string]){
		"at once": func(x *Index[string]) { x.Add(keys, "a") },
		"block by block": func(x *Index[string]) {
			for i := range keys {
				x.Add(keys[i:i+1], "a")
			}
			x.Score(keys, nil) // tells that they are a chain
		},
		"with holes": func(x *Index[string]) {
			x.Add(keys, "a")
			for i := 0; i < len(keys); i += 2 {
				x.Evict(keys[i], "a")
				x.Add(keys[i:i+1], "a")
			}
			x.Score(keys, nil)
		},
		"as a branch of another": func(x *Index[string]) {
			x.Add(slices.Concat(keys[:100], chain(2, 400)), "a")
			x.Add(keys, "a")
			for range x.Lookup(keys, nil) {
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := newIndex(t, 4*maxRun, 2)
			came(x)
			x.Add(keys[:200], "b") // a change of the pods is no new piece
			if got := pieces(x, keys); got > 2 {
				t.Fatalf("%d pieces", got)
			}
			if got, want := scores(x, keys), map[string]int{"a": len(keys), "b": 200}; !maps.Equal(got, want) {
				t.Fatalf("got %v", got)
			}
			check(t, x)
		})
	}
}

// TestAReaderLinksOnlySoManyKeys: writers wait for a reader that links, whatever the
// length of a chain that came block by block.
func TestAReaderLinksOnlySoManyKeys(t *testing.T) {
	const length = 62_500
	x := newIndex(t, 2*length, 2)
	keys := chain(1, length)
	for _, key := range keys {
		x.Add([]uint64{key}, "a")
	}
	single := func() (count int) {
		for _, key := range keys {
			table, i, _ := x.keys.find(key)
			if table.place(i).run() == 0 {
				count++
			}
		}
		return count
	}
	before := single()
	if before < length-maxRelinked {
		t.Fatalf("%d of %d keys are linked already", length-before, length)
	}
	for before > 0 {
		if scores := x.Score(keys, nil); len(scores) != 1 || scores[0].Blocks != length {
			t.Fatalf("scores are %v", scores)
		}
		after := single()
		if linked := before - after; linked > maxRelinked || linked < min(before, maxRelinked) {
			if before <= 2*length/keysPerPiece {
				break // they are so few that they are not worth it
			}
			t.Fatalf("a read linked %d keys of %d", linked, before)
		}
		before = after
	}
}

// TestABlockTakesAtMost64Bytes, whatever the fill.
func TestABlockTakesAtMost64Bytes(t *testing.T) {
	const capacity = 100_000
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return stats.HeapAlloc
	}
	for _, pods := range []int{1, 10, 40} {
		before := heap()
		x := newIndex(t, capacity, pods)
		for next := uint64(0); x.Len() < capacity; next++ {
			for pod := range pods {
				x.Add(chain(next, 256), fmt.Sprint("pod", (int(next)+pod)%40))
			}
			if next%50 == 49 || x.Len() == capacity {
				if got := float64(heap()-before) / float64(x.Len()); got > 64 {
					t.Errorf("%d pods, %d blocks: %.1f bytes each", pods, x.Len(), got)
				}
			}
		}
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
		const capacity = 40
		x := newIndex(t, capacity, 5)
		model := map[uint64]map[string]bool{}
		for i := 0; i+2 < len(steps); i += 3 {
			keys := chain(uint64(steps[i+1]%4), 1+int(steps[i+1]/4))
			pod := string('a' + rune(steps[i+2]%5))
			switch steps[i] % 6 {
			case 0:
				x.Evict(keys[len(keys)-1], pod)
				withdraw(model, pod, keys[len(keys)-1])
			case 1:
				x.Evict(keys[0], pod)
				withdraw(model, pod, keys[0])
			case 2:
				x.Clear(pod)
				withdraw(model, pod, slices.Collect(maps.Keys(model))...)
			case 3:
				x.Score(keys, nil)
			default:
				keys = keys[int(steps[i]/6)%len(keys):]
				x.Add(keys, pod)
				add(model, pod, keys)
			}
			if want := min(capacity, len(model)); x.Len() != want {
				t.Fatalf("Len %d, not %d", x.Len(), want)
			}
			dropped(x, model, keys, pod)
			compare(t, x, model, keys)
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

// BenchmarkFloor compares the keys of a chain with themselves somewhere else.
func BenchmarkFloor(b *testing.B) {
	keys := chain(1, chainBlocks)
	held := slices.Clone(keys)
	for b.Loop() {
		if matching(keys, held) != chainBlocks {
			b.Fatal("they differ")
		}
	}
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

func TestPodsBeyondTheFirst64AreScoredToo(t *testing.T) {
	for _, pods := range []int{64, 65, 200, 1_100} { // 1,024 have room on the stack
		x := newIndex(t, 1<<16, pods)
		keys := chain(1, 50)
		for pod := range pods {
			x.Add(keys[:1+pod*7%50], fmt.Sprint(pod))
		}
		scores := x.Score(keys, nil)
		if len(scores) != pods {
			t.Fatalf("%d of %d pods", len(scores), pods)
		}
		for _, s := range scores {
			var pod int
			fmt.Sscan(s.Pod, &pod)
			if want := 1 + pod*7%50; s.Blocks != want {
				t.Errorf("pod %d of %d: %d blocks, want %d", pod, pods, s.Blocks, want)
			}
		}
	}
}

// A router adds what each pod has cached, and asks how much of a prompt each holds.
func ExampleIndex_Score() {
	index, err := New[string](Config{Capacity: 1_000_000, MaxPodsPerKey: 64})
	if err != nil {
		panic(err)
	}
	index.Add([]uint64{11, 12, 13}, "pod-a", "pod-b")
	index.Evict(13, "pod-b")
	for _, score := range index.Score([]uint64{11, 12, 13, 14}, nil) {
		fmt.Println(score.Pod, score.Blocks)
	}
	// Unordered output:
	// pod-a 3
	// pod-b 2
}
