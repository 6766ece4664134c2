// SPDX-License-Identifier: Apache-2.0

// Package replay sends a trace through an index and counts what a router could have
// used of it.
package replay

import (
	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/trace"
)

// Usable counts blocks of prompts.
type Usable struct {
	// Asked is the blocks of all prompts.
	Asked int
	// Found is the blocks in front of which, and themselves, the index knew all: the
	// leading ones without a gap. Only those spare a pod any work.
	Found int
}

// Ratio returns the share of the blocks that were usable, from 0 to 1.
func (u Usable) Ratio() float64 {
	if u.Asked == 0 {
		return 0
	}
	return float64(u.Found) / float64(u.Asked)
}

// Run sends each request through an index in turn: a lookup of its chain, then what the
// one pod of this replay would report of it, the blocks that it had to compute because the
// index did not know them. So a block that is in use is read, but not added again, and
// stays only if a read counts. It is single-threaded.
func Run(index design.Index, requests []trace.Request) Usable {
	var usable Usable
	reader := index.NewReader()
	for _, request := range requests {
		reader.Lookup(request.Chain)
		usable.Asked += len(request.Chain)
		found := reader.Prefix()
		usable.Found += found
		index.Add(request.Chain[found:], "pod")
	}
	return usable
}

// Ideal is Run with an index that forgets nothing.
func Ideal(requests []trace.Request) Usable {
	var usable Usable
	seen := make(map[uint64]struct{})
	for _, request := range requests {
		usable.Asked += len(request.Chain)
		usable.Found += prefix(seen, request.Chain)
		for _, key := range request.Chain {
			seen[key] = struct{}{}
		}
	}
	return usable
}

func prefix(seen map[uint64]struct{}, chain []uint64) int {
	for n, key := range chain {
		if _, ok := seen[key]; !ok {
			return n
		}
	}
	return len(chain)
}
