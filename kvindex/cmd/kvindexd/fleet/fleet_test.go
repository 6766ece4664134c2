// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
	"kvtax/kvindex/cmd/kvindexd/feed"
)

func blocks(f *Fleet, q Query) []int {
	var found []int
	for _, holding := range f.NewReader().Lookup(&q) {
		found = append(found, holding.Blocks)
	}
	return found
}

// prompt returns ids that often begin as others do.
func prompt(random *rand.Rand) []uint32 {
	ids := make([]uint32, 1+random.IntN(120))
	for i := random.IntN(len(ids)); i < len(ids); i++ {
		ids[i] = random.Uint32N(2)
	}
	return ids
}

func salt(random *rand.Rand) string {
	return []string{"", "", "s", "t"}[random.IntN(4)]
}

// check compares the fleet's answers with what the engines have.
func check(t *testing.T, f *Fleet, engines []*engine, random *rand.Rand) {
	t.Helper()
	for range 20 {
		ids, salt := prompt(random), salt(random)
		found := blocks(f, Query{IDs: ids, Extra: blockhash.Extra{Salt: salt}})
		for n, one := range engines {
			if want := one.cached(ids, salt); found[n] != want {
				t.Fatalf("instance %d has %d blocks of %v with salt %q, not %d", n, want, ids, salt, found[n])
			}
		}
	}
}

// TestAnswersAreWhatTheEnginesHave: with several algorithms, duplicates, evictions and
// resets, through snapshots, and while others ask.
func TestAnswersAreWhatTheEnginesHave(t *testing.T) {
	for seed := range uint64(5) {
		random := rand.New(rand.NewPCG(seed, 3))
		f := newFleet(t, 1<<20, 3)
		engines := make([]*engine, 3)
		for n, algorithm := range []blockhash.Algorithm{blockhash.SHA256, blockhash.SHA256, blockhash.XXHashCBOR} {
			engines[n] = newEngine(f.instances[n], algorithm, "0")
			engines[n].to.Connected()
		}
		for range 400 {
			one := engines[random.IntN(3)]
			switch dice := random.IntN(100); {
			case dice < 1:
				one.reset()
			case dice < 40:
				if hash, ok := one.some(); ok {
					one.evict(hash)
				}
			default:
				ids, salt := prompt(random), salt(random)
				one.store(ids, salt, min(random.IntN(3), one.cached(ids, salt)), "GPU")
			}
			if random.IntN(20) == 0 {
				check(t, f, engines, random)
			}
			if random.IntN(100) == 0 {
				f = reloaded(t, f)
				for n, one := range engines {
					one.to = f.instances[n]
				}
			}
		}
		for _, one := range engines {
			if got := one.to.Status(); got.Blocks["GPU"] != len(one.held) || got.Skipped > 0 || !got.Complete {
				t.Errorf("an engine of %d blocks is said to be %+v", len(one.held), got)
			}
		}
	}
}

// reloaded returns a fleet made of a snapshot of another one.
func reloaded(t *testing.T, f *Fleet) *Fleet {
	t.Helper()
	file := filepath.Join(t.TempDir(), "snapshot")
	if err := f.Save(file); err != nil {
		t.Fatal(err)
	}
	again := newFleet(t, f.maxBlocks, len(f.instances))
	if err := again.Load(file); err != nil {
		t.Fatal(err)
	}
	for n, one := range again.instances {
		if one.Position() != f.instances[n].Position() {
			t.Errorf("the position is %v, not %v", one.Position(), f.instances[n].Position())
		}
		if got := blocks(again, Query{IDs: []uint32{0, 0, 0, 0, 0}}); got[n] != 0 {
			t.Error("a snapshot counts before its publisher is found unchanged")
		}
		one.Connected()
	}
	return again
}

func TestASnapshotThatIsTornIsNotRead(t *testing.T) {
	f := newFleet(t, 100, 1)
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	one.store(make([]uint32, 40), "", 0, "GPU")
	file := filepath.Join(t.TempDir(), "snapshot")
	if err := f.Save(file); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for n := range data {
		torn := append([]byte(nil), data...)
		torn[n] ^= 0x40
		for _, bad := range [][]byte{data[:n], torn} {
			if err := os.WriteFile(file, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			if newFleet(t, 100, 1).Load(file) == nil {
				t.Fatalf("read: %d of %d bytes", n, len(data))
			}
		}
	}
}

func TestAnInstanceAnswersOnlyWhileItIsConnected(t *testing.T) {
	f := newFleet(t, 100, 1)
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	ids := make([]uint32, 9)
	asked := func(want int) {
		t.Helper()
		if got := blocks(f, Query{IDs: ids}); got[0] != want {
			t.Errorf("%d blocks, not %d", got[0], want)
		}
	}
	one.store(ids, "", 0, "GPU")
	asked(0)
	one.to.Connected()
	asked(2)
	one.to.Disconnected(os.ErrClosed)
	asked(0)
	one.to.Connected()
	asked(2)
	one.to.Drop("it is another one")
	asked(0)
}

// TestASeedThatIsNotKnownIsToldByAPlainPrompt: not by one with a salt, as what vLLM hashes
// for that may be of a form that is not known here.
func TestASeedThatIsNotKnownIsToldByAPlainPrompt(t *testing.T) {
	f := newFleet(t, 100, 1)
	one := newEngine(f.instances[0], blockhash.SHA256, "77")
	one.to.Connected()
	one.store(make([]uint32, 9), "salt", 0, "GPU")
	if got := one.to.Status(); got.Naming != HashPending || got.Skipped != 0 {
		t.Errorf("after a salted prompt %+v", got)
	}
	one.store(make([]uint32, 9), "", 0, "GPU")
	if got := one.to.Status(); got.Naming != HashUnrecognized || got.Skipped != 2 || f.Blocks() != 0 {
		t.Errorf("%+v, %d blocks", got, f.Blocks())
	}
	// It starts anew, as it was told to.
	one.to.Drop("it is another one")
	again := newEngine(f.instances[0], blockhash.SHA256, "0")
	again.store(make([]uint32, 9), "salt", 0, "GPU")
	again.to.Connected()
	check(t, f, []*engine{again}, rand.New(rand.NewPCG(1, 1)))
}

func TestOneOddPromptCondemnsNobody(t *testing.T) {
	for _, salt := range []string{"", strings.Repeat("s", 70_000)} {
		f := newFleet(t, 100, 1)
		odd := newEngine(f.instances[0], blockhash.SHA256, "77")
		odd.to.Connected()
		odd.store(make([]uint32, 9), salt, 0, "GPU")
		one := newEngine(f.instances[0], blockhash.SHA256, "0")
		one.number = odd.number
		one.store(make([]uint32, 9), "", 0, "GPU")
		if got := blocks(f, Query{IDs: make([]uint32, 9)}); got[0] != 2 {
			t.Errorf("%d blocks of a plain prompt, not 2: %+v", got[0], one.to.Status())
		}
	}
}

func TestManyOddPromptsCondemnNobody(t *testing.T) {
	f := newFleet(t, 100, 1)
	odd := newEngine(f.instances[0], blockhash.SHA256, "77")
	odd.to.Connected()
	for n := range 2 * maxAttempts {
		odd.store([]uint32{uint32(n), 0, 0, 0}, "salt", 0, "GPU")
	}
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	one.number = odd.number
	one.store(make([]uint32, 9), "", 0, "GPU")
	if got := blocks(f, Query{IDs: make([]uint32, 9)}); got[0] != 2 {
		t.Errorf("%d blocks of a plain prompt, not 2: %+v", got[0], one.to.Status())
	}
}

func TestNamesAreLookedUpAsTheyAre(t *testing.T) {
	f := newFleet(t, 100, 2)
	one := newEngine(f.instances[1], blockhash.SHA256, "0")
	one.to.Connected()
	ids := make([]uint32, 40)
	one.store(ids, "", 0, "GPU")
	var names []uint64
	for _, hash := range one.hashes(ids, "") {
		names = append(names, blockhash.Name(hash))
	}
	if got := blocks(f, Query{Names: append(names[:7:7], 1, names[8])}); got[0] != 0 || got[1] != 7 {
		t.Errorf("%v blocks, not [0 7]", got)
	}
}

func TestBlocksInLowerMediaGoOnWhereTheGPUStops(t *testing.T) {
	f := newFleet(t, 1000, 2)
	ids := make([]uint32, 41)
	for n, medium := range []string{"CPU", "storage"} {
		one := newEngine(f.instances[n], blockhash.SHA256, "0")
		one.to.Connected()
		one.store(ids[:12+4*n], "", 0, "GPU")
		one.store(ids[:32], "", 2, medium) // blocks 2 to 7
	}
	for n, holding := range f.NewReader().Lookup(&Query{IDs: ids}) {
		want := []string{"CPU", "STORAGE"}[n]
		if holding.Blocks != 3+n || holding.Further != 5-n || holding.MediumName() != want {
			t.Errorf("%+v", holding)
		}
		if got := holding.Score(); got != float64(3+n)+0.8*float64(5-n) {
			t.Errorf("the score is %v", got)
		}
	}
}

// TestWhatAnInstanceNamesIsItsOwn: its adapters, its media, and how it names blocks.
func TestWhatAnInstanceNamesIsItsOwn(t *testing.T) {
	f := newFleet(t, 1000, 2)
	ids := make([]uint32, 41)
	other := newEngine(f.instances[1], blockhash.SHA256, "0")
	other.to.Connected()
	for n := range maxMedia + 1 {
		other.store(ids[:8], "", 0, fmt.Sprint("M", n))
	}
	other.to.adapters.add("llama")
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	one.to.Connected()
	one.store(ids[:12], "", 0, "GPU")
	one.store(ids[:32], "", 2, "CPU")
	holding := f.NewReader().Lookup(&Query{IDs: ids, Model: "llama"})[0]
	if holding.Blocks != 3 || holding.Further != 5 || holding.MediumName() != "CPU" {
		t.Errorf("%+v", holding)
	}
	if why := other.to.Status().Why; !strings.Contains(why, "more than 8 media") {
		t.Error(why)
	}
	other.reset()
	if left := other.to.adapters.all(); len(left) > 0 {
		t.Error("left over:", left)
	}
}

func TestEnginesThatShareAStreamAreNotBelieved(t *testing.T) {
	f := newFleet(t, 100, 1)
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	one.to.Connected()
	one.store(make([]uint32, 8), "", 0, "GPU")
	one.rank = 1
	one.number = 0
	one.store(make([]uint32, 8), "", 0, "GPU")
	one.store(make([]uint32, 8), "", 0, "GPU")
	got := one.to.Status()
	if got.Complete || !strings.Contains(got.Why, "ranks 0 and 1") || blocks(f, Query{IDs: make([]uint32, 9)})[0] > 0 {
		t.Errorf("%+v", got)
	}
}

func TestABatchThatCannotBeReadVoidsTheState(t *testing.T) {
	f := newFleet(t, 100, 1)
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	one.to.Connected()
	one.store(make([]uint32, 9), "", 0, "GPU")
	one.to.Take(1, []byte("no msgpack"))
	if got := one.to.Status(); got.Complete || got.Blocks["GPU"] != 0 || got.NextBatch != 2 || f.Blocks() != 0 {
		t.Errorf("%+v", got)
	}
}

// TestAnUnknownEventCostsNoMoreThanItSays: blocks that are known stay, and so do those that
// come with it in a batch. But it may have said that some are gone.
func TestAnUnknownEventCostsNoMoreThanItSays(t *testing.T) {
	unknown := map[string][]byte{
		"an array":           msgp.AppendInt(msgp.AppendString(msgp.AppendArrayHeader(nil, 2), "BlockMoved"), 1),
		"a map":              msgp.AppendInt(msgp.AppendString(msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 2), "type"), "BlockMoved"), "block_hashes"), 1),
		"a map without type": msgp.AppendInt(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "block_hashes"), 1),
		"nothing":            msgp.AppendArrayHeader(nil, 0),
		"a number":           msgp.AppendInt(nil, 1),
	}
	for name, event := range unknown {
		f := newFleet(t, 100, 1)
		one := newEngine(f.instances[0], blockhash.SHA256, "0")
		one.to.Connected()
		one.store(make([]uint32, 9), "", 0, "GPU")
		one.publish(event)
		one.store(make([]uint32, 13), "", 2, "GPU")
		got := one.to.Status()
		if blocks(f, Query{IDs: make([]uint32, 14)})[0] != 3 || got.Dropped > 0 || got.Unknown != 1 || got.Complete {
			t.Errorf("after %s: %+v", name, got)
		}
		one.reset()
		if !one.to.Status().Complete {
			t.Errorf("after %s and a reset there is more to know", name)
		}
	}
}

func TestExtraKeysOfAnUnknownFormCondemnNobody(t *testing.T) {
	f := newFleet(t, 100, 1)
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	one.to.Connected()
	for n, keys := range [][]byte{
		msgp.AppendBool(msgp.AppendArrayHeader(msgp.AppendArrayHeader(nil, 1), 1), true),
		msgp.AppendFloat64(msgp.AppendArrayHeader(msgp.AppendArrayHeader(nil, 1), 1), 1.5),
		msgp.AppendMapHeader(nil, 0),
		msgp.AppendString(nil, "keys"),
	} {
		b := msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 5), "type"), "BlockStored")
		b = appendHashes(b, [][]byte{make([]byte, 32)})
		b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), blockTokens)
		for range blockTokens {
			b = msgp.AppendInt(b, n)
		}
		b = msgp.AppendInt(msgp.AppendString(b, "block_size"), blockTokens)
		one.publish(append(msgp.AppendString(b, "extra_keys"), keys...))
	}
	one.store(make([]uint32, 9), "", 0, "GPU")
	if got := one.to.Status(); got.Naming != HashStatus(blockhash.SHA256) || got.Dropped > 0 || blocks(f, Query{IDs: make([]uint32, 9)})[0] != 2 {
		t.Errorf("%+v", got)
	}
}

func TestNamesThatAreTooLongAreNotKept(t *testing.T) {
	f := newFleet(t, 100, 1)
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	one.store(make([]uint32, 9), "", 0, strings.Repeat("x", 1<<20))
	if got := one.to.Status(); got.Skipped != 2 || len(got.Blocks) != 1 {
		t.Errorf("%d blocks skipped, %d media", got.Skipped, len(got.Blocks))
	}
}

func TestBlocksThatNoPromptCanHaveAreNotKept(t *testing.T) {
	f := newFleet(t, 100, 1)
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	one.to.Connected()
	one.store(make([]uint32, 4), "", 0, "GPU")
	for _, other := range [][2]int{{blockTokens, 1}, {2 * blockTokens, 0}} { // size, group
		b := msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 4), "type"), "BlockStored")
		b = appendHashes(b, [][]byte{make([]byte, 32)})
		b = msgp.AppendInt(msgp.AppendString(b, "block_size"), other[0])
		one.publish(msgp.AppendInt(msgp.AppendString(b, "group_idx"), other[1]))
	}
	if got := one.to.Status(); got.Skipped != 2 || f.Blocks() != 1 {
		t.Errorf("%d blocks, %+v", f.Blocks(), got)
	}
}

// TestASnapshotGivesNobodyWhatIsNotTheirs: an instance that publishes elsewhere now, and
// one whose seed was not known then.
func TestASnapshotGivesNobodyWhatIsNotTheirs(t *testing.T) {
	f := newFleet(t, 100, 2)
	newEngine(f.instances[0], blockhash.SHA256, "0").store(make([]uint32, 8), "", 0, "GPU")
	newEngine(f.instances[1], blockhash.SHA256, "77").store(make([]uint32, 8), "", 0, "GPU")
	file := filepath.Join(t.TempDir(), "snapshot")
	if err := f.Save(file); err != nil {
		t.Fatal(err)
	}
	again := newFleet(t, 100, 2)
	again.instances[0].Source.Events = "ipc:///elsewhere"
	if err := again.Load(file); err != nil {
		t.Fatal(err)
	}
	for _, one := range again.instances {
		if got := one.Status(); got.NextBatch != 0 || got.Naming != HashPending || again.Blocks() != 0 {
			t.Errorf("%+v, %d blocks", got, again.Blocks())
		}
	}
}

func TestAModelThatIsAnAdapterIsKnownAfterARestart(t *testing.T) {
	f := newFleet(t, 100, 1)
	newEngine(f.instances[0], blockhash.SHA256, "0").store(make([]uint32, 8), "", 0, "GPU")
	f.instances[0].adapters.add("adapter")
	if again := reloaded(t, f); !slices.Contains(again.instances[0].adapters.all(), "adapter") {
		t.Error("forgotten")
	}
}

// layers are those of gpt-oss and Gemma 3, of Mamba hybrids, of a model that never looks at
// the whole prompt, and of one whose groups have blocks of different sizes.
var layers = map[string][]group{
	"sliding window first": {{"sliding_window", 13, 4, false}, {"full_attention", 0, 4, false}},
	"five sliding windows": {
		{"sliding_window", 8, 4, false}, {"sliding_window", 8, 4, false}, {"mla_attention", 0, 4, false},
		{"sliding_window_mla", 8, 4, false}, {"sliding_window", 8, 4, false}, {"sliding_window", 8, 4, false},
	},
	"mamba":              {{"mamba", 0, 4, false}, {"full_attention", 0, 4, false}, {"mamba", 0, 4, false}},
	"all three":          {{"full_attention", 0, 4, false}, {"mamba", 0, 4, false}, {"sliding_window", 10, 4, false}},
	"mamba only":         {{"mamba", 0, 4, false}},
	"window only":        {{"sliding_window", 9, 4, false}},
	"large full blocks":  {{"full_attention", 0, 12, false}, {"sliding_window", 6, 4, false}},
	"large window":       {{"full_attention", 0, 4, false}, {"sliding_window", 20, 8, false}},
	"large mamba blocks": {{"mamba", 0, 16, false}, {"full_attention", 0, 8, false}, {"sliding_window", 30, 4, false}},
}

// reusable is what vLLM's coordinator finds, told as what it must be: the longest prefix
// after which each group has the blocks that its layers look back at.
func (e *engine) reusable(groups []group, ids []uint32) int {
	hashes := e.hashes(ids[:len(ids)-1], "")
	align := 1
	for _, g := range groups {
		align *= g.BlockTokens / gcd(align, g.BlockTokens)
	}
	for length := (len(ids) - 1) / align * align; length > 0; length -= align {
		usable := true
		for n, g := range groups {
			first, end := 0, length/g.BlockTokens
			switch g.Kind {
			case "mamba":
				first = end - 1
			case "sliding_window", "sliding_window_mla":
				first = max(0, end-(g.Window-1+g.BlockTokens-1)/g.BlockTokens)
			}
			for ; first < end; first++ {
				hash := hashes[(first+1)*g.BlockTokens/blockTokens-1]
				usable = usable && e.held[fmt.Sprint(n, string(hash))] > 0
			}
		}
		if usable {
			return length
		}
	}
	return 0
}

// storeGroup says that blocks of a prompt are there for a group: those that stay wants.
func (e *engine) storeGroup(number int, g group, ids []uint32, stay func(block int) bool) {
	b := msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 8), "type"), "BlockStored")
	all, stored := e.hashes(ids, ""), [][]byte(nil)
	whole := len(ids) / g.BlockTokens
	for n := range whole {
		hash := all[(n+1)*g.BlockTokens/blockTokens-1]
		if key := fmt.Sprint(number, string(hash)); stay(n) && e.held[key] == 0 {
			stored = append(stored, hash)
			e.held[key]++
		}
	}
	b = appendHashes(b, stored)
	b = msgp.AppendNil(msgp.AppendString(b, "parent_block_hash"))
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(whole*g.BlockTokens))
	for _, id := range ids[:whole*g.BlockTokens] {
		b = msgp.AppendUint32(b, id)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), g.BlockTokens)
	b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), number)
	b = msgp.AppendString(msgp.AppendString(b, "kv_cache_spec_kind"), g.Kind)
	b = msgp.AppendString(b, "kv_cache_spec_sliding_window")
	if g.Window == 0 {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendInt(b, g.Window)
	}
	e.publish(b)
}

func (e *engine) evictGroup(key string) {
	delete(e.held, key)
	var number int
	fmt.Sscan(key[:1], &number)
	b := msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 4), "type"), "BlockRemoved")
	b = appendHashes(b, [][]byte{[]byte(key[1:])})
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	e.publish(msgp.AppendInt(msgp.AppendString(b, "group_idx"), number))
}

// TestAHybridModelHasWhatVLLMWouldReuse: with blocks left out and evicted in any order,
// beside a model that is none, and through snapshots.
func TestAHybridModelHasWhatVLLMWouldReuse(t *testing.T) {
	for name, groups := range layers {
		t.Run(name, func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, 1))
			f := newFleet(t, 1<<20, 2)
			one := newEngine(f.instances[0], blockhash.SHA256, "0")
			plain := newEngine(f.instances[1], blockhash.SHA256, "0")
			one.to.Connected()
			plain.to.Connected()
			hits := 0
			for step := range 300 {
				ids := prompt(random)
				if step == 0 {
					ids = make([]uint32, 48) // as the first tells how blocks are named
				}
				for n, g := range groups {
					sparse := g.attention() != fullAttention && step > 0 && random.IntN(2) == 0
					one.storeGroup(n, g, ids, func(int) bool { return !sparse || random.IntN(3) > 0 })
				}
				plain.store(ids, "", min(2, plain.cached(ids, "")), "GPU")
				for range random.IntN(12) {
					if key, ok := one.some(); ok && step > 0 {
						one.evictGroup(key)
					}
				}
				if step%100 == 99 {
					f = reloaded(t, f)
					one.to, plain.to = f.instances[0], f.instances[1]
				}
				asked := prompt(random)
				got := f.NewReader().Lookup(&Query{IDs: asked})
				want := one.reusable(groups, asked)
				if got[0].Blocks*got[0].BlockTokens != want || got[1].Blocks != plain.cached(asked, "") {
					t.Fatalf("step %d: %+v of %v, not %d tokens and %d blocks", step, got, asked, want, plain.cached(asked, ""))
				}
				hits += min(want, 1)
			}
			if hits < 50 {
				t.Errorf("only %d of 300 prompts were found", hits)
			}
		})
	}
}

// TestPartsOfBlocksAreFoundWhereVLLMFindsThem: Mamba states in the middle of a block, and
// the last part of a prompt for full attention.
func TestPartsOfBlocksAreFoundWhereVLLMFindsThem(t *testing.T) {
	f := newFleet(t, 1000, 1)
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	one.to.Connected()
	groups := []group{{"mamba", 0, 16, false}, {"full_attention", 0, 16, false}}
	part := func(n, tokens int) { // vLLM names the part by what is hashed last
		groups[n].BlockTokens = blockTokens
		one.storeGroup(n, groups[n], make([]uint32, tokens), func(block int) bool { return (block+1)*blockTokens == tokens })
		groups[n].BlockTokens = 16
	}
	whole := func(n, tokens int) {
		one.storeGroup(n, groups[n], make([]uint32, tokens), func(int) bool { return true })
	}
	asked := func(tokens, want int) {
		t.Helper()
		if got := f.NewReader().Lookup(&Query{IDs: make([]uint32, tokens)})[0]; got.Blocks*got.BlockTokens != want {
			t.Errorf("%d of %d tokens, not %d", got.Blocks*got.BlockTokens, tokens, want)
		}
	}
	whole(1, 64)
	part(0, 40)
	asked(65, 40) // the third block has what is before, too
	asked(40, 0)
	part(1, 72)
	part(0, 72)
	asked(80, 72)
	asked(72, 40)
	part(0, 16)
	asked(40, 16)
}

// TestAGroupOfAnUnknownKindCostsWhatIsItsOwn: the others are looked up as if it were not.
func TestAGroupOfAnUnknownKindCostsWhatIsItsOwn(t *testing.T) {
	f := newFleet(t, 1000, 1)
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	one.to.Connected()
	for n, kind := range []string{"unheard_of", "sliding_window", "full_attention"} {
		one.storeGroup(n, group{Kind: kind, Window: 9, BlockTokens: 4}, make([]uint32, 40), func(block int) bool { return n > 0 })
	}
	if got := blocks(f, Query{IDs: make([]uint32, 41)}); got[0] != 10 {
		t.Errorf("%d blocks, not 10", got[0])
	}
	got := one.to.Status()
	if len(got.Groups) != 3 || got.Groups[0].BlockTokens != 0 || got.Groups[1].Window != 9 || got.Blocks["GPU"] != 10 {
		t.Errorf("%+v", got)
	}
}

func TestMemoryIsBounded(t *testing.T) {
	const maxBlocks = 500
	f := newFleet(t, maxBlocks, 1)
	one := newEngine(f.instances[0], blockhash.SHA256, "0")
	one.to.Connected()
	hot := make([]uint32, 41)
	one.store(hot, "", 0, "GPU")
	random := rand.New(rand.NewPCG(1, 1))
	for n := range 300 {
		ids := make([]uint32, 40)
		for i := range ids {
			ids[i] = random.Uint32()
		}
		one.store(ids, "", 0, "GPU")
		if f.Blocks() > maxBlocks {
			t.Fatalf("%d blocks", f.Blocks())
		}
		if got := blocks(f, Query{IDs: hot}); got[0] != 10 {
			t.Fatalf("after %d prompts, %d blocks are left of one that is asked for each time", n, got[0])
		}
	}
	// The same blocks, again and again.
	for range maxBlocks + 2 {
		ids := make([]uint32, 40)
		for i := range ids {
			ids[i] = random.Uint32()
		}
		one.store(ids, "", 0, "GPU")
		one.store(ids, "", 0, "GPU")
		if n := len(one.to.state.Refcounts); n > maxBlocks {
			t.Fatalf("%d further blocks are counted", n)
		}
	}
}

// TestAnInstanceIsSaidToHoldWhatIsKept: when blocks are forgotten for lack of room, its
// account is of those that are left, is no longer complete, and says so after a restart.
func TestAnInstanceIsSaidToHoldWhatIsKept(t *testing.T) {
	const maxBlocks = 500
	f := newFleet(t, maxBlocks, 3)
	random := rand.New(rand.NewPCG(1, 1))
	engines := make([]*engine, 3)
	for n := range engines {
		engines[n] = newEngine(f.instances[n], blockhash.SHA256, "0")
		engines[n].to.Untouched()
	}
	store := func(e *engine, prompts int) {
		for range prompts {
			ids := make([]uint32, 40)
			for i := range ids {
				ids[i] = random.Uint32()
			}
			e.store(ids, "", 0, "GPU")
		}
	}
	account := func(f *Fleet, want ...bool) {
		t.Helper()
		sum := 0
		for n, instance := range f.instances {
			got := instance.Status()
			sum += got.Blocks["GPU"]
			if got.Complete != want[n] {
				t.Errorf("instance %d is said to be complete: %v", n, got.Complete)
			}
		}
		if sum != f.Blocks() || sum > maxBlocks {
			t.Errorf("the instances are said to hold %d blocks, %d are kept", sum, f.Blocks())
		}
	}
	store(engines[0], 20)
	store(engines[1], 20)
	account(f, true, true, true)
	store(engines[2], 20)
	account(f, false, true, true)
	store(engines[2], 80)
	account(f, false, false, false)
	for range 100 { // events of blocks that were forgotten
		if hash, ok := engines[2].some(); ok {
			engines[2].evict(hash)
		}
	}
	account(f, false, false, false)
	account(reloaded(t, f), false, false, false)
	engines[2].reset()
	store(engines[2], 1)
	account(f, false, false, true)
}

func TestABlockTwiceInOneEventIsCountedOnce(t *testing.T) {
	for _, blocks := range []int{1, 40} {
		f := newFleet(t, 100, 1)
		one := newEngine(f.instances[0], blockhash.SHA256, "0")
		hashes := one.hashes(make([]uint32, blockTokens*blocks), "")
		twice := append(hashes, hashes...)
		one.publish(appendHashes(msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 2), "type"), "BlockStored"), twice))
		if got := one.to.Status().Blocks["GPU"]; got != blocks {
			t.Errorf("%d blocks, not %d", got, blocks)
		}
		for left, hash := range slices.Backward(twice) { // each is there twice
			one.held[string(hash)] = 1
			one.evict(string(hash))
			if got := one.to.Status().Blocks["GPU"]; got != min(left, blocks) {
				t.Errorf("%d blocks after %d were removed", got, 2*blocks-left)
			}
		}
	}
}

func TestFleetsThatCannotBeAreRefused(t *testing.T) {
	two := []InstanceConfig{{Name: "a"}, {Name: "a"}}
	for _, config := range []Config{{MaxBlocks: 1}, {MaxBlocks: 1, Instances: two}, {Instances: two[:1]}} {
		if _, err := New(config, slog.New(slog.DiscardHandler)); err == nil {
			t.Error("made:", fmt.Sprint(config))
		}
	}
}

const blockTokens = 4

func newFleet(t testing.TB, maxBlocks, instances int) *Fleet {
	t.Helper()
	config := Config{MaxBlocks: maxBlocks, MemoBytes: 1 << 20, Seeds: []string{"0"}}
	for n := range instances {
		config.Instances = append(config.Instances, InstanceConfig{Name: fmt.Sprint("i", n), Source: feed.Source{Events: "ipc:///e"}})
	}
	f, err := New(config, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// An engine is a prefix cache of vLLM's, as far as events tell of it: hashes of blocks,
// how often each is there, and the batches that say so.
type engine struct {
	hasher *blockhash.Hasher
	seed   blockhash.Hash
	held   map[string]int
	to     *Instance
	number uint64
	rank   int
}

func newEngine(to *Instance, algorithm blockhash.Algorithm, seed string) *engine {
	h := blockhash.New(algorithm)
	return &engine{hasher: h, seed: h.Seed(seed), held: make(map[string]int), to: to}
}

// hashes returns those of the whole blocks of a prompt.
func (e *engine) hashes(ids []uint32, salt string) [][]byte {
	var found [][]byte
	extra := blockhash.Extra{Salt: salt}
	hash := e.seed
	for start := 0; start+blockTokens <= len(ids); start += blockTokens {
		end := start + blockTokens
		hash = e.hasher.Block(&hash, ids[start:end], extra.Keys(blockhash.Placed, start, end))
		found = append(found, slices.Clone(hash.Bytes()))
	}
	return found
}

// cached returns how many leading blocks vLLM would find: not the one of the last token.
func (e *engine) cached(ids []uint32, salt string) int {
	for n, hash := range e.hashes(ids[:len(ids)-1], salt) {
		if e.held[string(hash)] == 0 {
			return n
		}
	}
	return (len(ids) - 1) / blockTokens
}

// store says that the blocks of a prompt from one on are there, once more.
func (e *engine) store(ids []uint32, salt string, from int, medium string) {
	hashes := e.hashes(ids, salt)
	if from >= len(hashes) {
		return
	}
	if medium == "GPU" {
		for _, hash := range hashes[from:] {
			e.held[string(hash)]++
		}
	}
	b := msgp.AppendMapHeader(nil, 6)
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockStored")
	b = appendHashes(b, hashes[from:])
	b = msgp.AppendString(b, "parent_block_hash")
	if from > 0 {
		b = msgp.AppendBytes(b, hashes[from-1])
	} else {
		b = msgp.AppendNil(b)
	}
	tokens := ids[from*blockTokens : len(hashes)*blockTokens]
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(len(tokens)))
	for _, id := range tokens {
		b = msgp.AppendUint32(b, id)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), blockTokens)
	b = msgp.AppendString(msgp.AppendString(b, "medium"), medium)
	if salt != "" {
		b[0]++
		b = msgp.AppendArrayHeader(msgp.AppendString(b, "extra_keys"), 1)
		if from == 0 {
			b = msgp.AppendString(msgp.AppendArrayHeader(b, 1), salt)
		} else {
			b = msgp.AppendNil(b)
		}
	}
	e.publish(b)
}

func (e *engine) evict(hash string) {
	if e.held[hash]--; e.held[hash] == 0 {
		delete(e.held, hash)
	}
	b := msgp.AppendMapHeader(nil, 3)
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockRemoved")
	b = appendHashes(b, [][]byte{[]byte(hash)})
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	e.publish(b)
}

func (e *engine) reset() {
	clear(e.held)
	b := msgp.AppendMapHeader(nil, 1)
	e.publish(msgp.AppendString(msgp.AppendString(b, "type"), "AllBlocksCleared"))
}

func appendHashes(b []byte, hashes [][]byte) []byte {
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(len(hashes)))
	for _, hash := range hashes {
		b = msgp.AppendBytes(b, hash)
	}
	return b
}

func (e *engine) publish(event []byte) {
	b := msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 3), 1.5)
	b = append(msgp.AppendArrayHeader(b, 1), event...)
	e.to.Take(e.number, msgp.AppendInt(b, e.rank))
	e.number++
}

// some returns a hash that is held, or none.
func (e *engine) some() (string, bool) {
	for hash := range e.held {
		return hash, true
	}
	return "", false
}
