// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
)

const hashSeed = "0"

// A prompt is what is asked for, and what the answer must be.
type prompt struct {
	ids     []uint32
	hashes  [][]byte
	held    []int // leading blocks, by instance
	request []byte
}

// makePrompts returns prompts of random ids, of which instances hold the more the higher
// their number.
func makePrompts(l *load) []prompt {
	random := rand.New(rand.NewPCG(1, 1))
	hasher := blockhash.New(blockhash.SHA256)
	all := make([]prompt, l.Prompts)
	for n := range all {
		one := &all[n]
		one.ids = make([]uint32, l.IDs)
		for i := range one.ids {
			one.ids[i] = random.Uint32N(150_000)
		}
		hash := hasher.Seed(hashSeed)
		for start := 0; start+l.BlockTokens < l.IDs; start += l.BlockTokens {
			hash = hasher.Block(&hash, one.ids[start:start+l.BlockTokens], nil)
			one.hashes = append(one.hashes, bytes.Clone(hash.Bytes()))
		}
		for instance := range l.Instances {
			one.held = append(one.held, len(one.hashes)*(instance+1)/l.Instances)
		}
		one.request = request(one.ids, l.JSON)
	}
	return all
}

func request(ids []uint32, asJSON bool) []byte {
	kind, body := "application/octet-stream", []byte(nil)
	if asJSON {
		kind = "application/json"
		body, _ = json.Marshal(ids)
	} else {
		for _, id := range ids {
			body = binary.LittleEndian.AppendUint32(body, id)
		}
	}
	head := fmt.Sprintf("POST /v1/lookup HTTP/1.1\r\nHost: kvindexd\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n", kind, len(body))
	return append([]byte(head), body...)
}

// check compares an answer with what the instances hold.
func (p *prompt) check(answer []byte) error {
	var found struct{ Instances []struct{ Blocks int } }
	if err := json.Unmarshal(answer, &found); err != nil {
		return fmt.Errorf("%w: %s", err, answer)
	}
	if len(found.Instances) != len(p.held) {
		return fmt.Errorf("%d instances, not %d", len(found.Instances), len(p.held))
	}
	for n, one := range found.Instances {
		if one.Blocks != p.held[n] {
			return fmt.Errorf("instance %d: %d blocks, not %d", n, one.Blocks, p.held[n])
		}
	}
	return nil
}
