// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"container/list"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvtax/kvtax/kvindex"
	"github.com/kvtax/kvtax/kvindex/bench/trace"
)

// TestMain is kvbench itself where a test asks for it: each trial is a process.
func TestMain(m *testing.M) {
	if os.Getenv("KVBENCH_TEST_PROGRAM") != "" {
		if err := command(context.Background(), os.Args[1:], os.Stdout, os.Stderr); err != nil {
			os.Stderr.WriteString(err.Error())
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// peerOf is a program that is kvindex under the peer's name, with a shell command after it.
func peerOf(t *testing.T, filter string) string {
	t.Helper()
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "peer")
	script := "#!/bin/sh\n" + own + " trial \"$@\"" + filter + "\n"
	if err := os.WriteFile(path, []byte(script), 0o777); err != nil {
		t.Fatal(err)
	}
	return path
}

func bench(t *testing.T, args ...string) error {
	t.Helper()
	t.Setenv("KVBENCH_TEST_PROGRAM", "1")
	var stderr bytes.Buffer
	return command(t.Context(), args, &stderr, &stderr)
}

func TestARunHasEveryRowOfBothSidesAndTheReportSaysSo(t *testing.T) {
	folder := t.TempDir()
	out, readme := filepath.Join(folder, "results.json"), filepath.Join(folder, "README.md")
	if err := bench(t, "run", "-quick", "-peer", peerOf(t, ""), "-out", out); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	var file results
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Trials) != 2*len(rows(quickArguments)) || file.Provenance.Crate != "1.6.1" {
		t.Fatalf("%d trials of %d rows, crate %q", len(file.Trials), len(rows(quickArguments)), file.Provenance.Crate)
	}
	for _, trial := range file.Trials {
		r := trial.Result
		if r.Latency == nil && r.BytesPerBlock == 0 || trial.Kind == "burst" && r.Events.PerS == 0 {
			t.Errorf("%s of %s: %+v", trial.Row, trial.Side, r)
		}
		if trial.Kind == "lookup" && (len(r.Answers) != hotPrefixes || !strings.Contains(r.Answers[0], ":")) {
			t.Errorf("%s: answers %q", trial.Row, r.Answers)
		}
	}
	if err := os.WriteFile(readme, []byte("before\n"+beginMarker+"old\n"+endMarker+"\nafter\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := bench(t, "report", "-in", out, "-readme", readme); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range rows(quickArguments) {
		if !strings.Contains(string(text), row.name+" | ") {
			t.Errorf("%q is not in the report", row.name)
		}
	}
	if s := string(text); strings.Contains(s, "1 M") || !strings.Contains(s, "100000 blocks on 1 pods") {
		t.Errorf("the report of 100,000 blocks names another number:\n%s", s)
	}
	if s := string(text); !strings.HasPrefix(s, "before\n") || !strings.HasSuffix(s, "\nafter\n") || strings.Contains(s, "old\n") {
		t.Errorf("the report did not replace what is between the markers:\n%s", s)
	}
}

func TestLocksHaveARowOfEachDesign(t *testing.T) {
	folder := t.TempDir()
	out, readme := filepath.Join(folder, "locks.json"), filepath.Join(folder, "README.md")
	if err := os.WriteFile(readme, []byte(lockBegin+lockEnd), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := bench(t, "locks", "-rounds", "1", "-out", out, "-readme", readme); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	var file locked
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	for i, kept := range []int{263, 263, 0} {
		d := file.Designs[i]
		if d.Design != designs[i] || d.KeptBlocks != kept || d.P50Us[0] <= 0 || d.EventsPerS[0] <= 0 {
			t.Errorf("%+v, want %d blocks kept", d, kept)
		}
	}
}

func TestARunFailsIfAnAnswerIsWrong(t *testing.T) {
	for name, test := range map[string]struct{ filter, says string }{
		"another answer": {" | sed s/35:263/35:262/", "the answers differ"},
		"a wrong one":    {` | sed s/'"wrong":0'/'"wrong":7'/`, "7 answers are wrong"},
	} {
		t.Run(name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "results.json")
			err := bench(t, "run", "-quick", "-peer", peerOf(t, test.filter), "-out", out)
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want %q", err, test.says)
			}
			if _, err := os.Stat(out); err == nil {
				t.Error("results were written")
			}
		})
	}
}

func TestTheReadmeSaysWhatWasMeasured(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "README.md")
	if err := os.WriteFile(path, readme, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := bench(t, "report", "-in", "../results.json", "-readme", path); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, readme) {
		t.Errorf("README.md is not what kvbench report makes of results.json: %v", err)
	}
}

// TestThePeerHasTheSameLoad looks for the constants in the other program.
func TestThePeerHasTheSameLoad(t *testing.T) {
	source, err := os.ReadFile("peer/src/main.rs")
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]int{
		"PODS": podCount, "HOT_PREFIXES": hotPrefixes, "EVENT_BLOCKS": eventBlocks,
		"FILLER_BLOCKS": fillerBlocks, "KEPT_EVENTS": keptEvents,
	} {
		if line := fmt.Sprintf("const %s: usize = %d;", name, value); !strings.Contains(string(source), line) {
			t.Errorf("%q is not in peer/src/main.rs", line)
		}
	}
}

const tracesFolder = "../../fleet/traces/"

// tolerance is by how much the usable share of blocks may be below that of exact LRU.
const tolerance = 0.005

// A cache is an index in a replay, on one pod: found returns how many leading blocks of a
// chain it holds, and counts as a read of these; add adds others.
type cache struct {
	found func(chain []uint64) int
	add   func(chain []uint64)
}

func kvindexCache(t *testing.T, capacity int) cache {
	t.Helper()
	x, err := kvindex.New[string](kvindex.Config{Capacity: capacity, MaxPodsPerKey: 1})
	if err != nil {
		t.Fatal(err)
	}
	return cache{
		found: func(chain []uint64) int {
			for _, s := range x.Score(chain, nil) {
				return s.Blocks
			}
			return 0
		},
		add: func(chain []uint64) { x.Add(chain, "pod") },
	}
}

// exactLRU is the reference: the key that was not read or added for longest goes, by one
// order of all reads and additions, head first.
func exactLRU(capacity int) cache {
	keys, order := map[uint64]*list.Element{}, list.New()
	return cache{
		found: func(chain []uint64) int {
			for n, key := range chain {
				if keys[key] == nil {
					return n
				}
				order.MoveToFront(keys[key])
			}
			return len(chain)
		},
		add: func(chain []uint64) {
			for _, key := range chain {
				if keys[key] != nil {
					order.MoveToFront(keys[key])
					continue
				}
				if len(keys) == capacity {
					delete(keys, order.Remove(order.Back()).(uint64))
				}
				keys[key] = order.PushFront(key)
			}
		},
	}
}

// usable returns which share of all blocks is found in a replay: of each request first
// what is held of its chain, then the pod reports the blocks that it had to compute. So a
// block that is in use is read, but not added again, and stays only if a read counts.
func usable(c cache, requests []trace.Request) float64 {
	found, blocks := 0, 0
	for _, request := range requests {
		n := c.found(request.Chain)
		c.add(request.Chain[n:])
		found += n
		blocks += len(request.Chain)
	}
	return float64(found) / float64(blocks)
}

func TestKvindexIsAsGoodAsExactLRU(t *testing.T) {
	conversation, err := trace.Conversation(tracesFolder + "mooncake_conversation_trace.jsonl.xz")
	if err != nil {
		t.Fatal(err)
	}
	sessions, err := trace.Sessions(tracesFolder + "claude_code_sessions_le62k.jsonl.xz")
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []struct {
		name       string
		requests   []trace.Request
		capacities []int // from room for a few prompts to room for most of what comes again
	}{
		{"synthetic", trace.Synthetic(1, 4_000), []int{10_000, 40_000, 80_000}},
		{"conversation", conversation, []int{10_000, 20_000, 40_000}},
		{"sessions", sessions, []int{2_000, 5_000, 10_000}},
	} {
		for _, capacity := range w.capacities {
			t.Run(fmt.Sprintf("%s/%d", w.name, capacity), func(t *testing.T) {
				wanted := usable(exactLRU(capacity), w.requests) - tolerance
				if got := usable(kvindexCache(t, capacity), w.requests); got < wanted {
					t.Errorf("%.4f of the blocks are usable, want %.4f", got, wanted)
				}
				if got := usable(exactLRU(capacity*3/4), w.requests); got >= wanted {
					t.Errorf("three quarters of the room pass with %.4f: the check cannot fail", got)
				}
			})
		}
	}
}
