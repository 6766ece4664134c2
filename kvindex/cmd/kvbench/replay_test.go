// SPDX-License-Identifier: Apache-2.0

package main

import (
	"container/list"
	"fmt"
	"testing"

	"kvtax/kvindex"
	"kvtax/kvindex/cmd/kvbench/trace"
)

const tracesFolder = "../../../fleet/traces/"

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
