// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"slices"
	"testing"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/trace"
)

const traces = "../../../../traces/"

// tolerance is by how much the usable share of blocks may be below that of exact LRU.
const tolerance = 0.005

// A workload is a trace and three capacities, in keys: from room for a few prompts to
// room for most of what comes again.
type workload struct {
	name       string
	requests   []trace.Request
	capacities []int
	// fails is a design that does not get as near to exact LRU at the first capacity.
	fails []string
}

func workloads(t *testing.T) []workload {
	t.Helper()
	conversation, err := trace.Conversation(traces + "mooncake_conversation_trace.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	sessions, err := trace.Sessions(traces + "claude_code_sessions_le62k.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	return []workload{
		{"synthetic", trace.Synthetic(1, 4_000), []int{10_000, 40_000, 80_000}, []string{"sharded"}},
		{"conversation", conversation, []int{10_000, 40_000, 80_000}, []string{"sharded", "xsync-sieve"}},
		{"sessions", sessions, []int{2_000, 5_000, 10_000}, []string{"sharded", "xsync-sieve"}},
	}
}

func ratio(t *testing.T, name string, capacity int, requests []trace.Request) float64 {
	t.Helper()
	index, err := design.New(name, capacity, 10)
	if err != nil {
		t.Fatal(err)
	}
	return Run(index, requests).Ratio()
}

func TestKvindexIsAsGoodAsExactLRUAndOthersAreNot(t *testing.T) {
	for _, w := range workloads(t) {
		for i, capacity := range w.capacities {
			t.Run(fmt.Sprintf("%s/%d", w.name, capacity), func(t *testing.T) {
				wanted := ratio(t, "exact-lru", capacity, w.requests) - tolerance
				if got := ratio(t, "kvindex", capacity, w.requests); got < wanted {
					t.Errorf("%.4f of the blocks are usable, want %.4f", got, wanted)
				}
				if i > 0 {
					return
				}
				for _, name := range w.fails {
					if got := ratio(t, name, capacity, w.requests); got >= wanted {
						t.Errorf("%s passes with %.4f: the check tells nothing", name, got)
					}
				}
			})
		}
	}
}

func TestTheIdealForgetsNothing(t *testing.T) {
	requests := trace.Synthetic(2, 100)
	ideal := Ideal(requests)
	if got := ratio(t, "exact-lru", ideal.Asked, requests); got != ideal.Ratio() {
		t.Errorf("%v with room for every block, the ideal is %v", got, ideal.Ratio())
	}
	if got := ratio(t, "exact-lru", 1_000, requests); got >= ideal.Ratio() {
		t.Errorf("%v with room for some blocks, the ideal is %v", got, ideal.Ratio())
	}
}

func TestOnlyLeadingBlocksAreUsable(t *testing.T) {
	chains := [][]uint64{{1, 2, 3}, {1, 2, 4, 5}, {9, 4, 5}, {1, 2, 3}, nil}
	var requests []trace.Request
	for _, chain := range chains {
		requests = append(requests, trace.Request{Chain: chain})
	}
	want := Usable{Asked: 13, Found: 0 + 2 + 0 + 3}
	if got := Ideal(requests); got != want {
		t.Errorf("ideal %+v, want %+v", got, want)
	}
	for _, name := range design.Names() {
		index, err := design.New(name, 1_000, 10)
		if err != nil {
			t.Fatal(err)
		}
		if got := Run(index, slices.Clone(requests)); got != want {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
}

func TestNothingAskedIsARatioOfZero(t *testing.T) {
	if got := (Usable{}).Ratio(); got != 0 {
		t.Error(got)
	}
}
