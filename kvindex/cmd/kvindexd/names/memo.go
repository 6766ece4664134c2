// SPDX-License-Identifier: Apache-2.0

// Package names tells by which names vLLM knows the blocks of a prompt.
//
// vLLM's own hash costs about 3 ns per token, so it is computed once for what prompts
// have in common: a memo goes from token ids, by a fast hash, to the names.
package names

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/zeebo/xxh3"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
)

// A HashScheme is the hash algorithm, seed and block size with which an instance names blocks.
type HashScheme struct {
	Algorithm   blockhash.Algorithm
	Seed        string
	BlockTokens int
}

// blocksPerSpan is how many blocks are remembered together: less memory for each, and
// fewer places to look at. What follows the last whole span is hashed for each prompt.
const blocksPerSpan = 8

// A span is blocks that follow each other. It does not change.
type span struct {
	key   xxh3.Uint128 // of everything to the end of the span
	names [blocksPerSpan]uint64
	last  blockhash.Hash
}

// SpanBytes is what a span takes: what Go gives for its 120 bytes, and its slot.
const SpanBytes = 128 + 8

// A Memo remembers the names of blocks by the ids of their tokens. Where two spans want
// the same place, the later one has it. Any goroutine may use it at any time.
//
// Two prompts are taken for one if 128 bits of a hash agree that is seeded anew in each
// process: among 10^9 spans, with odds of 1 to 10^20.
type Memo struct {
	seed  uint64
	slots []atomic.Pointer[span]
}

// NewMemo returns a memo that takes up to so many bytes.
func NewMemo(bytes int) *Memo {
	return &Memo{rand.Uint64(), make([]atomic.Pointer[span], max(1, bytes/SpanBytes))}
}

func (m *Memo) slot(key xxh3.Uint128) *atomic.Pointer[span] {
	at, _ := bits.Mul64(key.Hi, uint64(len(m.slots)))
	return &m.slots[at]
}

// A Namer names blocks by one scheme. It keeps buffers, so it is for one goroutine at a time.
type Namer struct {
	memo   *Memo
	scheme HashScheme
	hasher *blockhash.Hasher
	seed   blockhash.Hash
	text   []byte
}

// NewNamer returns a Namer with that memo.
func NewNamer(memo *Memo, scheme HashScheme) *Namer {
	hasher := blockhash.New(scheme.Algorithm)
	return &Namer{memo: memo, scheme: scheme, hasher: hasher, seed: hasher.Seed(scheme.Seed)}
}

// Append appends the names of the blocks of ids to names, in order, with the extra keys
// in a style. It stops where held says no of the last name so far, and the next are not
// in the memo: nobody has what follows, so that need not be hashed. The names of the
// incomplete block at the end are left out.
func (n *Namer) Append(names []uint64, ids []uint32, extra *blockhash.Extra, style blockhash.Style, held func(uint64) bool) []uint64 {
	size := n.scheme.BlockTokens
	before := len(names)
	known := func() bool { return len(names) == before || held(names[len(names)-1]) }
	parent := &n.seed
	key := n.root(extra, style)
	images := imageWindow{next: extra.Images}
	near := *extra // with the images of a few blocks
	start := 0
	for ; start+blocksPerSpan*size <= len(ids); start += blocksPerSpan * size {
		end := start + blocksPerSpan*size
		near.Images = images.move(start, end)
		key = n.key(key, ids, &near, style, start, end)
		slot := n.memo.slot(key)
		found := slot.Load()
		if found == nil || found.key != key {
			if !known() {
				return names
			}
			found = &span{key: key}
			for i := range found.names {
				at := start + i*size
				found.last = n.hasher.Block(parent, ids[at:at+size], near.Keys(style, at, at+size))
				found.names[i] = found.last.Name()
				parent = &found.last
			}
			slot.Store(found)
		}
		names = append(names, found.names[:]...)
		parent = &found.last
	}
	if !known() {
		return names
	}
	last := *parent
	for ; start+size <= len(ids); start += size {
		near.Images = images.move(start, start+size)
		last = n.hasher.Block(&last, ids[start:start+size], near.Keys(style, start, start+size))
		names = append(names, last.Name())
	}
	return names
}

// An imageWindow moves along a prompt, and has the images that reach into it: to look at
// all of them for each block would take the square of a prompt's length.
type imageWindow struct {
	in, next []blockhash.Image
}

// move moves the window on, to the tokens from start to end (without).
func (w *imageWindow) move(start, end int) []blockhash.Image {
	w.in = slices.DeleteFunc(w.in, func(i blockhash.Image) bool { return i.Offset+i.Tokens <= start })
	for len(w.next) > 0 && w.next[0].Offset < end {
		w.in = append(w.in, w.next[0])
		w.next = w.next[1:]
	}
	return w.in
}

// root is the key before the first span: of all that every block's name depends on.
func (n *Namer) root(extra *blockhash.Extra, style blockhash.Style) xxh3.Uint128 {
	n.text = fmt.Appendf(n.text[:0], "%q %d %q %q %q", n.scheme, style, extra.LoRA, extra.LoRAPath, extra.Salt)
	return xxh3.Hash128Seed(n.text, n.memo.seed)
}

// key is the key at the end of a span, by that at its start.
func (n *Namer) key(key xxh3.Uint128, ids []uint32, extra *blockhash.Extra, style blockhash.Style, start, end int) xxh3.Uint128 {
	if len(extra.Images) > 0 {
		n.text = n.text[:0]
		for at := start; at < end; at += n.scheme.BlockTokens {
			n.text = fmt.Appendf(n.text, "%q", extra.Keys(style, at, at+n.scheme.BlockTokens))
		}
		key = xxh3.Hash128Seed(n.text, key.Lo)
	}
	found := xxh3.Hash128Seed(bytesOf(ids[start:end]), key.Lo)
	found.Hi ^= key.Hi
	return found
}

// bytesOf returns the memory of ids: in this process alone, the same for the same ids.
func bytesOf(ids []uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(ids))), 4*len(ids))
}
