// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"fmt"
	"slices"
	"testing"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/trace"
)

const tracesFolder = "../../../../traces/"

// tolerance is by how much the usable share of blocks may be below that of exact LRU.
const tolerance = 0.005

// A workload is a trace and three capacities, in keys: from room for a few prompts to
// room for most of what comes again.
type workload struct {
	name       string
	requests   []trace.Request
	capacities []int
}

func workloads(t *testing.T) []workload {
	t.Helper()
	conversation, err := trace.Conversation(tracesFolder + "mooncake_conversation_trace.jsonl.xz")
	if err != nil {
		t.Fatal(err)
	}
	sessions, err := trace.Sessions(tracesFolder + "claude_code_sessions_le62k.jsonl.xz")
	if err != nil {
		t.Fatal(err)
	}
	return []workload{
		{"synthetic", trace.Synthetic(1, 4_000), []int{10_000, 40_000, 80_000}},
		{"conversation", conversation, []int{10_000, 40_000, 80_000}},
		{"sessions", sessions, []int{2_000, 5_000, 10_000}},
	}
}

func ratio(t *testing.T, name string, capacity int, requests []trace.Request) float64 {
	t.Helper()
	index, err := design.New(name, capacity, 10)
	if err != nil {
		t.Fatal(err)
	}
	return replayed(index, requests).ratio()
}

func TestKvindexIsAsGoodAsExactLRU(t *testing.T) {
	for _, w := range workloads(t) {
		for _, capacity := range w.capacities {
			t.Run(fmt.Sprintf("%s/%d", w.name, capacity), func(t *testing.T) {
				wanted := ratio(t, "exact-lru", capacity, w.requests) - tolerance
				if got := ratio(t, "kvindex", capacity, w.requests); got < wanted {
					t.Errorf("%.4f of the blocks are usable, want %.4f", got, wanted)
				}
				if got := ratio(t, "exact-lru", capacity*3/4, w.requests); got >= wanted {
					t.Errorf("three quarters of the room pass with %.4f: the check cannot fail", got)
				}
			})
		}
	}
}

// idealOf is replayed with an index that forgets nothing.
func idealOf(requests []trace.Request) usable {
	var u usable
	seen := make(map[uint64]bool)
	for _, request := range requests {
		u.blocks += len(request.Chain)
		missing := slices.IndexFunc(request.Chain, func(key uint64) bool { return !seen[key] })
		if missing < 0 {
			missing = len(request.Chain)
		}
		u.found += missing
		for _, key := range request.Chain {
			seen[key] = true
		}
	}
	return u
}

func TestTheIdealForgetsNothing(t *testing.T) {
	requests := trace.Synthetic(2, 100)
	ideal := idealOf(requests)
	if got := ratio(t, "exact-lru", ideal.blocks, requests); got != ideal.ratio() {
		t.Errorf("%v with room for every block, the ideal is %v", got, ideal.ratio())
	}
	if got := ratio(t, "exact-lru", 1_000, requests); got >= ideal.ratio() {
		t.Errorf("%v with room for some blocks, the ideal is %v", got, ideal.ratio())
	}
}

func TestOnlyLeadingBlocksAreUsable(t *testing.T) {
	chains := [][]uint64{{1, 2, 3}, {1, 2, 4, 5}, {9, 4, 5}, {1, 2, 3}, nil}
	var requests []trace.Request
	for _, chain := range chains {
		requests = append(requests, trace.Request{Chain: chain})
	}
	want := usable{blocks: 13, found: 0 + 2 + 0 + 3}
	if got := idealOf(requests); got != want {
		t.Errorf("ideal %+v, want %+v", got, want)
	}
	for _, name := range design.Names() {
		index, err := design.New(name, 1_000, 10)
		if err != nil {
			t.Fatal(err)
		}
		if got := replayed(index, slices.Clone(requests)); got != want {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
}

func TestNothingAskedIsARatioOfZero(t *testing.T) {
	if got := (usable{}).ratio(); got != 0 {
		t.Error(got)
	}
}
