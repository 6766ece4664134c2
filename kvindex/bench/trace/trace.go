// SPDX-License-Identifier: Apache-2.0

// Package trace reads request traces of LLM services, and makes one up: who asked when
// for which chain of blocks.
package trace

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/ulikunitz/xz"
)

// A Request is one prompt.
type Request struct {
	// At is when it came, from the start of the trace.
	At time.Duration
	// Chain is the keys of the prompt's blocks, head first. Equal keys stand for equal
	// blocks behind equal prefixes.
	Chain []uint64
	// Session is the number of the conversation it is part of, from 0, or -1 if the
	// trace does not tell.
	Session int
}

// byTime sorts requests by time, those of one moment as they are.
func byTime(requests []Request) {
	slices.SortStableFunc(requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
}

// mix turns the id of a block in a session into a key: one to one, and spread over 64
// bits as block hashes are (the finalizer of SplitMix64).
func mix(session, id uint32) uint64 {
	z := uint64(session)<<32 | uint64(id)
	z += 0x9E3779B97F4A7C15
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// chainOf returns the keys of the blocks with some ids.
func chainOf(session uint32, ids []uint32) []uint64 {
	chain := make([]uint64, len(ids))
	for i, id := range ids {
		chain[i] = mix(session, id)
	}
	return chain
}

// checkLength refuses a request whose blocks do not cover its prompt to within one
// block: with another block size than the trace's, every prompt would be too short or
// too long, and nothing else would tell.
func checkLength(blocks, blockTokens, inputTokens int) error {
	if covered := blocks * blockTokens; max(covered-inputTokens, inputTokens-covered) > blockTokens {
		return fmt.Errorf("%d blocks of %d tokens are %d tokens, but the input length is %d", blocks, blockTokens, covered, inputTokens)
	}
	return nil
}

// eachLine calls read with the lines of an xz file. Errors name the file and the line,
// counted from 1.
func eachLine(path string, read func(line []byte) error) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	defer file.Close()
	unzipped, err := xz.NewReader(bufio.NewReader(file))
	if err != nil {
		return fmt.Errorf("trace %s: not an xz file: %w", path, err)
	}
	lines := bufio.NewReader(unzipped)
	for n := 1; ; n++ {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF && len(line) == 0 {
			return nil
		}
		if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("the file ends within the line: it is torn, fetch it again")
		}
		if err == nil {
			err = read(line)
		}
		if err != nil {
			return fmt.Errorf("trace %s, line %d: %w", path, n, err)
		}
	}
}

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

// The synthetic trace: popular conversations that grow with each turn, and prompts that
// never come again. Of 4,000 requests an exact LRU of 10,000 keys finds about 0.37 of
// all blocks usable, one of 40,000 keys 0.78, one of 80,000 keys 0.88, and one that
// forgets nothing 0.90.
const (
	conversations    = 400
	zipfExponent     = 1.05 // popularity of conversation k is (zipfOffset + k) ^ -zipfExponent
	zipfOffset       = 4
	firstTurnBlocks  = 60
	minTurnBlocks    = 8
	maxTurnBlocks    = 40
	maxBlocks        = 1_500 // a conversation longer than that begins anew
	oneShotShare     = 0.03  // of all requests
	minOneShotBlocks = 200
	maxOneShotBlocks = 1_000
	interval         = 100 * time.Millisecond
)

// Synthetic makes up a trace of n requests. Equal seeds give equal traces.
func Synthetic(seed uint64, n int) []Request {
	random := rand.New(rand.NewPCG(seed, 0))
	zipf := rand.NewZipf(random, zipfExponent, zipfOffset, conversations-1)
	blocks := uint32(0)
	grow := func(chain []uint64, n int) []uint64 {
		for range n {
			chain = append(chain, mix(0, blocks))
			blocks++
		}
		return chain
	}
	between := func(low, high int) int { return low + random.IntN(high-low+1) }

	sessions := conversations
	session := make([]int, conversations)
	chains := make([][]uint64, conversations)
	for i := range chains {
		session[i] = i
		chains[i] = grow(nil, firstTurnBlocks)
	}
	requests := make([]Request, n)
	for i := range requests {
		at := time.Duration(i) * interval
		if random.Float64() < oneShotShare {
			requests[i] = Request{at, grow(nil, between(minOneShotBlocks, maxOneShotBlocks)), sessions}
			sessions++
			continue
		}
		c := zipf.Uint64()
		if len(chains[c]) > maxBlocks {
			session[c], chains[c] = sessions, grow(nil, firstTurnBlocks)
			sessions++
		}
		chains[c] = grow(chains[c], between(minTurnBlocks, maxTurnBlocks))
		requests[i] = Request{at, slices.Clone(chains[c]), session[c]}
	}
	return requests
}
