// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// sessionInterval is the time from the start of a session to that of the next. It is
// our choice: the trace only has times within a session.
const sessionInterval = time.Minute

// session is a line of the trace.
type session struct {
	BlockTokens int              `json:"block_size"`
	HashIDScope string           `json:"hash_id_scope"`
	Requests    []sessionRequest `json:"requests"`
}

// A sessionRequest is one call of the model, or the work of a subagent: a list of calls
// with times from its start.
type sessionRequest struct {
	Seconds     float64          `json:"t"`
	Type        string           `json:"type"`
	InputTokens int              `json:"in"`
	HashIDs     []uint32         `json:"hash_ids"`
	Requests    []sessionRequest `json:"requests"`
}

// Sessions reads a trace in the format of kv-cache-tester: a line is a session of a
// coding agent. Hash ids are those of one session, so no two sessions share a block.
// Session i starts i minutes after the first.
func Sessions(path string) ([]Request, error) {
	var requests []Request
	number := 0
	err := eachLine(path, func(line []byte) error {
		var s session
		if err := json.Unmarshal(line, &s); err != nil {
			return err
		}
		if s.HashIDScope != "local" || s.BlockTokens < 1 {
			return fmt.Errorf("hash_id_scope is %q and block_size %d; only local ids and a positive size are known",
				s.HashIDScope, s.BlockTokens)
		}
		if len(s.Requests) == 0 {
			return errors.New("a session without requests")
		}
		var err error
		requests, err = s.flatten(requests, number, s.Requests, time.Duration(number)*sessionInterval)
		number++
		return err
	})
	if err != nil {
		return nil, err
	}
	byTime(requests)
	return requests, nil
}

// flatten appends the calls among some requests, whose times count from start.
func (s *session) flatten(requests []Request, number int, some []sessionRequest, start time.Duration) ([]Request, error) {
	for _, r := range some {
		at := start + time.Duration(r.Seconds*float64(time.Second))
		if r.Type == "subagent" {
			var err error
			if requests, err = s.flatten(requests, number, r.Requests, at); err != nil {
				return nil, err
			}
			continue
		}
		if err := checkLength(len(r.HashIDs), s.BlockTokens, r.InputTokens); err != nil {
			return nil, fmt.Errorf("the request at %v s: %w", r.Seconds, err)
		}
		requests = append(requests, Request{
			At:      at,
			Chain:   chainOf(uint32(number), r.HashIDs),
			Session: number,
		})
	}
	return requests, nil
}
