// SPDX-License-Identifier: Apache-2.0

package llmd_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/kvtax/kvtax/kvindex/llmd"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"k8s.io/apimachinery/pkg/util/sets"
)

// A pair is upstream's index and the adapter, given the same calls.
type pair struct {
	t       *testing.T
	random  *rand.Rand
	theirs  kvblock.Index
	ours    kvblock.Index
	keys    []kvblock.BlockHash
	entries []kvblock.PodEntry
}

// TestAdapterAnswersLikeUpstream makes random calls to both, with room for everything.
func TestAdapterAnswersLikeUpstream(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			p := newPair(t, seed)
			for range 600 {
				p.call()
				p.compare()
			}
		})
	}
}

func newPair(t *testing.T, seed uint64) *pair {
	t.Helper()
	p := &pair{t: t, random: rand.New(rand.NewPCG(seed, 0))}
	config := &kvblock.InMemoryIndexConfig{Size: 1 << 12, PodCacheSize: 64}
	var err error
	if p.theirs, err = kvblock.NewInMemoryIndex(config); err != nil {
		t.Fatal(err)
	}
	if p.ours, err = llmd.New(config); err != nil {
		t.Fatal(err)
	}
	for i := range 64 {
		p.keys = append(p.keys, kvblock.BlockHash(i)) // key 0 among them
	}
	for _, pod := range []string{"a", "b", "c"} {
		p.entries = append(p.entries,
			kvblock.PodEntry{PodIdentifier: pod, DeviceTier: "gpu"},
			kvblock.PodEntry{PodIdentifier: pod, DeviceTier: "cpu"},
			kvblock.PodEntry{PodIdentifier: pod, Speculative: true},
			kvblock.PodEntry{PodIdentifier: pod, DeviceTier: "gpu", HasGroup: true, GroupIdx: 1},
		)
	}
	return p
}

// call makes one random call to both.
func (p *pair) call() {
	ctx := p.t.Context()
	entries := p.someEntries()
	switch p.random.IntN(12) {
	case 0:
		pod := entries[0].PodIdentifier
		p.same("Clear", p.theirs.Clear(ctx, pod), p.ours.Clear(ctx, pod))
	case 1, 2:
		key := p.keys[p.random.IntN(len(p.keys))]
		p.same("Evict of a request key", p.theirs.Evict(ctx, key, kvblock.RequestKey, entries),
			p.ours.Evict(ctx, key, kvblock.RequestKey, entries))
	case 3, 4, 5:
		key := engineKey(p.keys[p.random.IntN(len(p.keys))])
		p.same("Evict of an engine key", p.theirs.Evict(ctx, key, kvblock.EngineKey, entries),
			p.ours.Evict(ctx, key, kvblock.EngineKey, entries))
	default:
		engineKeys, keys := p.someKeys()
		p.same("Add", p.theirs.Add(ctx, engineKeys, keys, entries),
			p.ours.Add(ctx, engineKeys, keys, entries))
	}
}

func engineKey(key kvblock.BlockHash) kvblock.BlockHash { return key + 1_000 }

// someKeys returns a chain, and engine keys for it: none, as many, or a multiple or a
// fraction of as many.
func (p *pair) someKeys() (engineKeys, keys []kvblock.BlockHash) {
	n := 4 * (1 + p.random.IntN(3))
	first := p.random.IntN(len(p.keys) - 2*n)
	keys = p.keys[first : first+n]
	engines := []int{0, n, 2 * n, n / 2, n / 4}[p.random.IntN(5)]
	for _, key := range p.keys[first : first+engines] {
		engineKeys = append(engineKeys, engineKey(key))
	}
	return engineKeys, keys
}

func (p *pair) someEntries() []kvblock.PodEntry {
	entries := slices.Clone(p.entries)
	p.random.Shuffle(len(entries), func(i, j int) { entries[i], entries[j] = entries[j], entries[i] })
	return entries[:1+p.random.IntN(4)]
}

// compare asks both for everything.
func (p *pair) compare() {
	ctx := p.t.Context()
	for _, only := range []sets.Set[string]{nil, sets.New("a"), sets.New("b", "c"), sets.New("nobody")} {
		theirs, err := p.theirs.Lookup(ctx, p.keys, only)
		if err != nil {
			p.t.Fatal(err)
		}
		ours, err := p.ours.Lookup(ctx, p.keys, only)
		if err != nil {
			p.t.Fatal(err)
		}
		for _, key := range p.keys {
			if a, b := sorted(theirs[key]), sorted(ours[key]); !slices.Equal(a, b) {
				p.t.Fatalf("key %d, only %v: upstream has %v, the adapter %v", key, only, a, b)
			}
		}
		if len(theirs) != len(ours) {
			p.t.Fatalf("only %v: upstream returns %d keys, the adapter %d", only, len(theirs), len(ours))
		}
	}
	all, err := p.theirs.Lookup(ctx, p.keys, nil)
	if err != nil || p.ours.(*llmd.Index).Len() != len(all) {
		p.t.Fatalf("%d keys held, Len %d, %v", len(all), p.ours.(*llmd.Index).Len(), err)
	}
	for _, key := range p.keys {
		theirs, theirErr := p.theirs.GetRequestKey(ctx, engineKey(key))
		ours, ourErr := p.ours.GetRequestKey(ctx, engineKey(key))
		p.same("GetRequestKey", theirErr, ourErr)
		if theirs != ours {
			p.t.Fatalf("engine key %d: upstream says %d, the adapter %d", engineKey(key), theirs, ours)
		}
	}
}

func (p *pair) same(call string, theirs, ours error) {
	p.t.Helper()
	if fmt.Sprint(theirs) != fmt.Sprint(ours) {
		p.t.Fatalf("%s: upstream's error is %v, the adapter's %v", call, theirs, ours)
	}
}

func sorted(entries []kvblock.PodEntry) []string {
	var names []string
	for _, entry := range entries {
		names = append(names, entry.String())
	}
	slices.Sort(names)
	return names
}

func TestAdapterRefusesWhatUpstreamRefuses(t *testing.T) {
	p := newPair(t, 0)
	ctx, keys, entries := t.Context(), p.keys[:2], p.entries[:1]
	for name, call := range map[string]func(kvblock.Index) error{
		"no keys to look up": func(x kvblock.Index) error { _, err := x.Lookup(ctx, nil, nil); return err },
		"no keys to add":     func(x kvblock.Index) error { return x.Add(ctx, nil, nil, entries) },
		"no entries to add":  func(x kvblock.Index) error { return x.Add(ctx, keys, keys, nil) },
		"nothing to evict":   func(x kvblock.Index) error { return x.Evict(ctx, 1, kvblock.RequestKey, nil) },
		"unknown key type":   func(x kvblock.Index) error { return x.Evict(ctx, 1, 7, entries) },
		"unknown engine key": func(x kvblock.Index) error { _, err := x.GetRequestKey(ctx, 1); return err },
	} {
		theirs, ours := call(p.theirs), call(p.ours)
		if ours == nil {
			t.Errorf("%s: no error", name)
		}
		p.same(name, theirs, ours)
	}
	if err := p.ours.Add(ctx, []kvblock.BlockHash{}, keys, entries); err == nil {
		t.Error("engine keys that are neither known nor unknown: no error")
	}
}

func TestNewRefusesBoundsThatHoldNothing(t *testing.T) {
	for _, config := range []kvblock.InMemoryIndexConfig{{Size: 0, PodCacheSize: 1}, {Size: 1, PodCacheSize: 0}} {
		if _, err := llmd.New(&config); err == nil || !strings.Contains(err.Error(), "llmd: ") {
			t.Errorf("%+v: %v", config, err)
		}
	}
}

const upstream = "github.com/llm-d/llm-d-kv-cache"

// TestUpstreamsOwnTestsPass runs the tests that upstream has for its in-memory index, as
// they are in the pinned module, with the adapter in its place.
func TestUpstreamsOwnTestsPass(t *testing.T) {
	tests := filepath.Join(strings.TrimSpace(run(t, "go", "list", "-m", "-f", "{{.Dir}}", upstream)),
		"pkg", "kvcache", "kvblock")
	overlay := overlayOf(t, map[string]string{
		"index_test.go":     readFile(t, tests, "index_test.go"),
		"in_memory_test.go": withAdapter(t, readFile(t, tests, "in_memory_test.go")),
	})
	args := []string{"test", "-v", "-count=1", "-overlay", overlay, "./conformance"}
	if hasRaceDetector() {
		args = append(args[:1:1], append([]string{"-race"}, args[1:]...)...)
	}
	output := run(t, "go", args...)
	if n := strings.Count(output, "--- PASS: TestInMemoryIndexBehavior/"); n != 24 {
		t.Errorf("%d of upstream's 24 common tests passed", n)
	}
	for _, name := range []string{"Size", "PodCacheSize"} {
		if !strings.Contains(output, "--- PASS: TestInMemoryIndex"+name+" ") {
			t.Errorf("TestInMemoryIndex%s did not pass", name)
		}
	}
}

// hasRaceDetector reports whether this test was built with -race.
func hasRaceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// withAdapter lets upstream's tests make the adapter instead of upstream's index.
func withAdapter(t *testing.T, source string) string {
	t.Helper()
	const theirs = "NewInMemoryIndex("
	if n := strings.Count(source, theirs); n != 3 {
		t.Fatalf("upstream's tests make %d indexes, 3 are known", n)
	}
	return strings.ReplaceAll(source, theirs, "newIndexUnderTest(")
}

// overlayOf returns a file for go's -overlay that lays files over the folder conformance.
func overlayOf(t *testing.T, files map[string]string) string {
	t.Helper()
	folder, err := filepath.Abs("conformance")
	if err != nil {
		t.Fatal(err)
	}
	place := t.TempDir()
	replace := map[string]string{}
	for name, text := range files {
		replace[filepath.Join(folder, name)] = writeFile(t, place, name, []byte(text))
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	return writeFile(t, place, "overlay.json", text)
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, output)
	}
	return string(output)
}

func readFile(t *testing.T, elements ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(elements...))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func writeFile(t *testing.T, folder, name string, text []byte) string {
	t.Helper()
	path := filepath.Join(folder, name)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
