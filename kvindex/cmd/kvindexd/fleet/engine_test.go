// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
	"kvtax/kvindex/cmd/kvindexd/feed"
)

const blockTokens = 4

func newFleet(t testing.TB, maxBlocks, instances int) *Fleet {
	t.Helper()
	config := Config{MaxBlocks: maxBlocks, MemoBytes: 1 << 20, Seeds: []string{"0"}}
	for n := range instances {
		config.Instances = append(config.Instances, InstanceConfig{Name: fmt.Sprint("i", n), Source: feed.Source{Events: "ipc:///e"}})
	}
	f, err := New(config, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// An engine is a prefix cache of vLLM's, as far as events tell of it: hashes of blocks,
// how often each is there, and the batches that say so.
type engine struct {
	hasher *blockhash.Hasher
	seed   blockhash.Hash
	held   map[string]int
	to     *Instance
	number uint64
}

func newEngine(to *Instance, algorithm blockhash.Algorithm, seed string) *engine {
	h := blockhash.New(algorithm)
	return &engine{hasher: h, seed: h.Seed(seed), held: make(map[string]int), to: to}
}

// hashes returns those of the whole blocks of a prompt.
func (e *engine) hashes(ids []uint32, salt string) [][]byte {
	var found [][]byte
	extra := blockhash.Extra{Salt: salt}
	hash := e.seed
	for start := 0; start+blockTokens <= len(ids); start += blockTokens {
		end := start + blockTokens
		hash = e.hasher.Block(&hash, ids[start:end], extra.Keys(blockhash.Placed, start, end))
		found = append(found, slices.Clone(hash.Bytes()))
	}
	return found
}

// cached returns how many leading blocks vLLM would find: not the one of the last token.
func (e *engine) cached(ids []uint32, salt string) int {
	for n, hash := range e.hashes(ids[:len(ids)-1], salt) {
		if e.held[string(hash)] == 0 {
			return n
		}
	}
	return (len(ids) - 1) / blockTokens
}

// store says that the blocks of a prompt from one on are there, once more.
func (e *engine) store(ids []uint32, salt string, from int, medium string) {
	hashes := e.hashes(ids, salt)
	if from >= len(hashes) {
		return
	}
	if medium == "GPU" {
		for _, hash := range hashes[from:] {
			e.held[string(hash)]++
		}
	}
	b := msgp.AppendMapHeader(nil, 6)
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockStored")
	b = appendHashes(b, hashes[from:])
	b = msgp.AppendString(b, "parent_block_hash")
	if from > 0 {
		b = msgp.AppendBytes(b, hashes[from-1])
	} else {
		b = msgp.AppendNil(b)
	}
	tokens := ids[from*blockTokens : len(hashes)*blockTokens]
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(len(tokens)))
	for _, id := range tokens {
		b = msgp.AppendUint32(b, id)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), blockTokens)
	b = msgp.AppendString(msgp.AppendString(b, "medium"), medium)
	if salt != "" {
		b[0]++
		b = msgp.AppendArrayHeader(msgp.AppendString(b, "extra_keys"), 1)
		if from == 0 {
			b = msgp.AppendString(msgp.AppendArrayHeader(b, 1), salt)
		} else {
			b = msgp.AppendNil(b)
		}
	}
	e.publish(b)
}

func (e *engine) evict(hash string) {
	if e.held[hash]--; e.held[hash] == 0 {
		delete(e.held, hash)
	}
	b := msgp.AppendMapHeader(nil, 3)
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockRemoved")
	b = appendHashes(b, [][]byte{[]byte(hash)})
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	e.publish(b)
}

func (e *engine) reset() {
	clear(e.held)
	b := msgp.AppendMapHeader(nil, 1)
	e.publish(msgp.AppendString(msgp.AppendString(b, "type"), "AllBlocksCleared"))
}

func appendHashes(b []byte, hashes [][]byte) []byte {
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(len(hashes)))
	for _, hash := range hashes {
		b = msgp.AppendBytes(b, hash)
	}
	return b
}

func (e *engine) publish(event []byte) {
	b := msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 3), 1.5)
	b = append(msgp.AppendArrayHeader(b, 1), event...)
	e.to.Take(e.number, msgp.AppendInt(b, 0))
	e.number++
}

// some returns a hash that is held, or none.
func (e *engine) some() (string, bool) {
	for hash := range e.held {
		return hash, true
	}
	return "", false
}
