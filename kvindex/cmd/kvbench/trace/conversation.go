// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/json"
	"time"
)

// conversationBlockTokens is the block size of Mooncake's traces, which do not name it.
const conversationBlockTokens = 512

// Conversation reads a trace in the format of Mooncake's FAST'25 release: a line is a
// request, and equal hash ids anywhere in the file are equal blocks of 512 tokens.
func Conversation(path string) ([]Request, error) {
	var requests []Request
	err := eachLine(path, func(line []byte) error {
		var r struct {
			TimestampMs int64    `json:"timestamp"`
			InputLength int      `json:"input_length"`
			HashIDs     []uint32 `json:"hash_ids"`
		}
		if err := json.Unmarshal(line, &r); err != nil {
			return err
		}
		if err := checkLength(len(r.HashIDs), conversationBlockTokens, r.InputLength); err != nil {
			return err
		}
		requests = append(requests, Request{
			At:      time.Duration(r.TimestampMs) * time.Millisecond,
			Chain:   chainOf(0, r.HashIDs),
			Session: -1,
		})
		return nil
	})
	if err != nil {
		return nil, err
	}
	byTime(requests)
	return requests, nil
}
