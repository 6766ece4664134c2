// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"
)

const model = "model"

// A publisher sends what vLLM's engines would, to all who listen at some endpoints.
type publisher struct {
	t      testing.TB
	mu     sync.Mutex
	pub    zmq4.Socket
	number uint64
	asMaps bool // as vLLM 0.25 and later
}

func publish(t testing.TB, endpoints ...string) *publisher {
	t.Helper()
	p := &publisher{t: t, pub: zmq4.NewPub(context.Background())}
	for _, endpoint := range endpoints {
		if err := p.pub.Dial(endpoint); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { p.pub.Close() })
	return p
}

// send sends a batch of events as one pod's.
func (p *publisher) send(pod string, events ...any) {
	batch, err := msgpack.Marshal([]any{float64(time.Now().Unix()), events, 0})
	if err != nil {
		p.t.Fatal(err)
	}
	p.sendBatch(pod, batch)
}

func (p *publisher) sendBatch(pod string, batch []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	topic := fmt.Sprintf("kv@%s@%s", pod, model)
	number := binary.BigEndian.AppendUint64(nil, p.number)
	p.number++
	if err := p.pub.Send(zmq4.NewMsgFrom([]byte(topic), number, batch)); err != nil {
		p.t.Error(err)
	}
}

// event is one of vLLM's, of these fields: an array that begins with its type, or a map.
func (p *publisher) event(kind string, fields ...field) any {
	if p.asMaps {
		event := map[string]any{"type": kind}
		for _, one := range fields {
			event[one.name] = one.value
		}
		return event
	}
	event := []any{kind}
	for _, one := range fields {
		event = append(event, one.value)
	}
	return event
}

type field struct {
	name  string
	value any
}

// stored says that the blocks of a prompt from one on are cached.
func (p *publisher) stored(ids []uint32, from int, blockTokens int, medium string) any {
	hashes := hashesOf(ids, blockTokens)
	var parent any
	if from > 0 {
		parent = hashes[from-1]
	}
	whole := len(hashes) * blockTokens
	return p.event("BlockStored",
		field{"block_hashes", hashes[from:]}, field{"parent_block_hash", parent},
		field{"token_ids", ids[from*blockTokens : whole]}, field{"block_size", blockTokens},
		field{"lora_id", nil}, field{"medium", medium}, field{"lora_name", nil})
}

func (p *publisher) removed(hashes [][]byte, medium string) any {
	return p.event("BlockRemoved", field{"block_hashes", hashes}, field{"medium", medium})
}

func (p *publisher) cleared() any { return p.event("AllBlocksCleared") }

// hashesOf stands for vLLM's: of 32 bytes, each of the block and all before it.
func hashesOf(ids []uint32, blockTokens int) [][]byte {
	var hashes [][]byte
	var before []byte
	for start := 0; start+blockTokens <= len(ids); start += blockTokens {
		text := slices.Clone(before)
		for _, id := range ids[start : start+blockTokens] {
			text = binary.LittleEndian.AppendUint32(text, id)
		}
		sum := sha256.Sum256(text)
		before = sum[:]
		hashes = append(hashes, before)
	}
	return hashes
}

// A pod is the cache of one engine, as far as its events tell of it.
type pod struct {
	name string
	to   *publisher
	held map[string]string // the medium of each hash
}

func newPod(name string, to *publisher) *pod {
	return &pod{name, to, make(map[string]string)}
}

// act does one thing at random, and publishes what came of it.
func (p *pod) act(random *rand.Rand, prompts [][]uint32) {
	switch n := random.IntN(20); {
	case n == 0:
		clear(p.held)
		p.to.send(p.name, p.to.cleared())
	case n < 7:
		p.evict(random)
	default:
		p.store(random, prompts[random.IntN(len(prompts))])
	}
}

// store caches a prompt, or the beginning of it, from the first block that is not held.
func (p *pod) store(random *rand.Rand, prompt []uint32) {
	medium := []string{"GPU", "GPU", "GPU", "CPU"}[random.IntN(4)]
	prompt = prompt[:random.IntN(len(prompt)+1)]
	hashes := hashesOf(prompt, blockTokens)
	from := slices.IndexFunc(hashes, func(hash []byte) bool { return p.held[string(hash)] == "" })
	if from < 0 {
		return
	}
	for _, hash := range hashes[from:] {
		p.held[string(hash)] = medium
	}
	p.to.send(p.name, p.to.stored(prompt, from, blockTokens, medium))
}

// evict drops some of what is held, anywhere in its chains.
func (p *pod) evict(random *rand.Rand) {
	var events []any
	for hash, medium := range p.held {
		if random.IntN(6) == 0 {
			events = append(events, p.to.removed([][]byte{[]byte(hash)}, medium))
			delete(p.held, hash)
		}
	}
	if len(events) > 0 {
		p.to.send(p.name, events...)
	}
}
