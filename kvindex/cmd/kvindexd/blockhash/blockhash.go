// SPDX-License-Identifier: Apache-2.0

// Package blockhash computes the hashes by which vLLM names KV-cache blocks.
//
// A block's hash is that of the tuple (hash of the block before it, its token ids, its
// extra keys), serialised by Python's pickle or as CBOR: hash_block_tokens in
// vllm/v1/core/kv_cache_utils.py, and vllm/utils/hashing.py. Before the first block
// stands the hash of a seed, vLLM's NONE_HASH.
package blockhash

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// An Algorithm is a value of vLLM's --prefix-caching-hash-algo.
type Algorithm string

const (
	SHA256     Algorithm = "sha256"
	SHA256CBOR Algorithm = "sha256_cbor"
	XXHash     Algorithm = "xxhash"
	XXHashCBOR Algorithm = "xxhash_cbor"
)

// Algorithms are all of them, vLLM's default first.
var Algorithms = []Algorithm{SHA256, SHA256CBOR, XXHash, XXHashCBOR}

// DefaultSeed is what vLLM 0.30 and later take for sha256 and sha256_cbor where
// PYTHONHASHSEED is not set. Earlier ones take random bytes, which nobody can guess.
const DefaultSeed = "vllm-none-hash"

// MaxBlockTokens bounds a block, so that pickle puts it into one frame.
const MaxBlockTokens = 8192

// A Hash is the hash of a block: 32 bytes, or 16 of XXH3.
type Hash struct {
	bytes [sha256.Size]byte
	size  uint8
}

// Bytes returns the hash as vLLM has it.
func (h *Hash) Bytes() []byte { return h.bytes[:h.size] }

// Name returns the hash's last 8 bytes as a number: what vLLM itself publishes where
// VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is set, and enough to tell blocks apart.
func (h *Hash) Name() uint64 { return Name(h.Bytes()) }

// Name returns the name of the block with a hash; 0 if it has less than 8 bytes.
func Name(hash []byte) uint64 {
	if len(hash) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(hash[len(hash)-8:])
}

// A Hasher computes hashes with one algorithm. It keeps a buffer, so it is for one
// goroutine at a time.
type Hasher struct {
	encoder encoder
	sum     func([]byte) Hash
}

// An encoder serialises values as Python does.
type encoder interface {
	seed(string) []byte
	block(parent []byte, ids []uint32, extra Keys) []byte
}

// New returns a Hasher for an algorithm, one of Algorithms.
func New(algorithm Algorithm) *Hasher {
	h := &Hasher{encoder: new(pickle), sum: sumSHA256}
	if algorithm == SHA256CBOR || algorithm == XXHashCBOR {
		h.encoder = new(cbor)
	}
	if algorithm == XXHash || algorithm == XXHashCBOR {
		h.sum = sumXXH3
	}
	return h
}

// Seed returns what stands before the first block.
func (h *Hasher) Seed(seed string) Hash { return h.sum(h.encoder.seed(seed)) }

// Block returns the hash of the block of ids that follows the block parent.
func (h *Hasher) Block(parent *Hash, ids []uint32, extra Keys) Hash {
	return h.sum(h.encoder.block(parent.Bytes(), ids, extra))
}

func sumSHA256(data []byte) Hash {
	return Hash{sha256.Sum256(data), sha256.Size}
}

func sumXXH3(data []byte) Hash {
	hash := Hash{size: 16}
	sum := xxh3.Hash128(data).Bytes()
	copy(hash.bytes[:], sum[:])
	return hash
}

// Keys are the extra keys of a block, a Python tuple: strings, byte strings, ints, and
// Keys. A block without any has nil, Python's None.
type Keys []any

// Extra is what decides beside its token ids what the blocks of a prompt hold.
type Extra struct {
	LoRA     string  // name of the adapter, empty for none
	LoRAPath string  // where vLLM 0.32 and later were told to load it from
	Salt     string  // cache_salt of the request, empty for none
	Images   []Image // and other inputs that are not text, in the order of their places
}

// An Image is an input that stands in the prompt as a run of placeholder tokens.
type Image struct {
	ID     string // vLLM's identifier of it: a hash of its content
	Offset int    // the first of its tokens
	Tokens int
}

// A Style is how a release of vLLM writes extra keys.
type Style int

const (
	Bare   Style = iota // 0.18.1: an image is its identifier
	Placed              // 0.22 to 0.30: with its place in the block
	Tagged              // 0.32 and later: each key says what it is
)

// Styles returns the styles that differ for a prompt, one at least.
func (e *Extra) Styles() []Style {
	switch {
	case len(e.Images) > 0:
		return []Style{Bare, Placed, Tagged}
	case e.LoRA != "" || e.Salt != "":
		return []Style{Placed, Tagged}
	}
	return []Style{Tagged}
}

// Keys returns the extra keys of the block of tokens start to end (without) of a prompt:
// the adapter, the images that reach into the block, and in the first block the salt.
func (e *Extra) Keys(style Style, start, end int) Keys {
	var keys Keys
	if e.LoRA != "" {
		keys = append(keys, e.lora(style))
	}
	for _, image := range e.Images {
		if image.Offset < end && image.Offset+image.Tokens > start {
			keys = append(keys, image.key(style, start))
		}
	}
	if e.Salt != "" && start == 0 {
		if style == Tagged {
			keys = append(keys, Keys{tagSalt, e.Salt})
		} else {
			keys = append(keys, e.Salt)
		}
	}
	return keys
}

func (e *Extra) lora(style Style) any {
	if style == Tagged {
		return Keys{tagLoRA, e.LoRA, e.LoRAPath}
	}
	return e.LoRA
}

func (i *Image) key(style Style, start int) any {
	switch style {
	case Bare:
		return i.ID
	case Placed:
		return Keys{i.ID, i.Offset - start}
	}
	return Keys{tagImage, i.ID, i.Offset - start}
}

// Tagged returns what vLLM 0.32 and later hash for the keys of a block that are published
// without tags. That of a block with an adapter nobody can know who is not told its path.
func (k Keys) Tagged() Keys {
	if k == nil {
		return nil
	}
	tagged := Keys{}
	for _, key := range k {
		switch key := key.(type) {
		case string:
			tagged = append(tagged, Keys{tagSalt, key})
		case []byte:
			tagged = append(tagged, Keys{tagEmbeds, key})
		case Keys:
			tagged = append(tagged, append(Keys{tagImage}, key...))
		}
	}
	return tagged
}

const (
	tagEmbeds = "prompt_embeds"
	tagLoRA   = "lora"
	tagImage  = "mm"
	tagSalt   = "cache_salt"
)

func isTag(text string) bool {
	return text == tagLoRA || text == tagImage || text == tagSalt || text == tagEmbeds
}
