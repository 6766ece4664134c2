// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"fmt"
	"path/filepath"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/results"
	"kvtax/kvindex/cmd/kvbench/trace"
)

// syntheticRequests is the length of the synthetic trace.
const syntheticRequests = 6000

// traces are the known ones, each read from a folder.
var traces = map[string]func(folder string) ([]trace.Request, error){
	"synthetic": func(string) ([]trace.Request, error) {
		return trace.Synthetic(1, syntheticRequests), nil
	},
	"conversation": func(folder string) ([]trace.Request, error) {
		return trace.Conversation(filepath.Join(folder, "mooncake_conversation_trace.jsonl.xz"))
	},
	"sessions-le62k": func(folder string) ([]trace.Request, error) {
		return trace.Sessions(filepath.Join(folder, "claude_code_sessions_le62k.jsonl.xz"))
	},
	"sessions-any": func(folder string) ([]trace.Request, error) {
		return trace.Sessions(filepath.Join(folder, "claude_code_sessions_any.jsonl.xz"))
	},
}

// Replay sends the trace of a name through an index of some capacity.
func Replay(index design.Index, name, folder string, capacity int) (*results.Replay, error) {
	read, ok := traces[name]
	if !ok {
		return nil, fmt.Errorf("no trace is named %q", name)
	}
	requests, err := read(folder)
	if err != nil {
		return nil, err
	}
	usable := replayed(index, requests)
	return &results.Replay{
		Trace:       name,
		Capacity:    capacity,
		Requests:    len(requests),
		Blocks:      usable.blocks,
		UsableRatio: usable.ratio(),
	}, nil
}

// usable counts blocks of prompts.
type usable struct {
	// blocks are those of all prompts.
	blocks int
	// found are the leading blocks that the index knew without a gap. Only those spare a
	// pod any work.
	found int
}

// ratio returns the share of the blocks that were usable, from 0 to 1.
func (u usable) ratio() float64 {
	if u.blocks == 0 {
		return 0
	}
	return float64(u.found) / float64(u.blocks)
}

// replayed sends each request through an index in turn: a lookup of its chain, then what
// the one pod of this replay would report of it, the blocks that it had to compute because
// the index did not know them. So a block that is in use is read, but not added again, and
// stays only if a read counts. It is single-threaded.
func replayed(index design.Index, requests []trace.Request) usable {
	var u usable
	reader := index.NewReader()
	for _, request := range requests {
		reader.Lookup(request.Chain)
		u.blocks += len(request.Chain)
		found := reader.Prefix()
		u.found += found
		index.Add(request.Chain[found:], "pod")
	}
	return u
}
