// SPDX-License-Identifier: Apache-2.0

// Package trace reads request traces of LLM services, and makes one up: who asked when
// for which chain of blocks.
package trace

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
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

// eachLine calls read with the lines of a gzip file. Errors name the file and the line,
// counted from 1.
func eachLine(path string, read func(line []byte) error) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(bufio.NewReader(file))
	if err != nil {
		return fmt.Errorf("trace %s: not a gzip file: %w", path, err)
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
