// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"fmt"
	"path/filepath"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/replay"
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
		return trace.Conversation(filepath.Join(folder, "mooncake_conversation_trace.jsonl.gz"))
	},
	"sessions-le62k": func(folder string) ([]trace.Request, error) {
		return trace.Sessions(filepath.Join(folder, "claude_code_sessions_le62k.jsonl.gz"))
	},
	"sessions-any": func(folder string) ([]trace.Request, error) {
		return trace.Sessions(filepath.Join(folder, "claude_code_sessions_any.jsonl.gz"))
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
	usable := replay.Run(index, requests)
	return &results.Replay{
		Trace:       name,
		Capacity:    capacity,
		Requests:    len(requests),
		Blocks:      usable.Asked,
		UsableRatio: usable.Ratio(),
	}, nil
}
