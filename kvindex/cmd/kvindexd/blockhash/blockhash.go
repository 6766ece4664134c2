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

// cbor writes what cbor2.dumps(value, canonical=True) writes for a few types (RFC 8949).
type cbor struct{ out []byte }

// Major types, in the upper three bits of the first byte.
const (
	majorUnsigned = 0 << 5
	majorNegative = 1 << 5
	majorBytes    = 2 << 5
	majorText     = 3 << 5
	majorArray    = 4 << 5
	cborNull      = 0xf6
)

func (c *cbor) seed(seed string) []byte {
	c.out = c.out[:0]
	c.text(seed)
	return c.out
}

func (c *cbor) block(parent []byte, ids []uint32, extra Keys) []byte {
	c.out = c.out[:0]
	c.head(majorArray, 3)
	c.binary(parent)
	c.head(majorArray, uint64(len(ids)))
	for _, id := range ids {
		c.head(majorUnsigned, uint64(id))
	}
	if extra == nil {
		c.out = append(c.out, cborNull)
	} else {
		c.array(extra)
	}
	return c.out
}

func (c *cbor) array(keys Keys) {
	c.head(majorArray, uint64(len(keys)))
	for _, key := range keys {
		switch key := key.(type) {
		case string:
			c.text(key)
		case []byte:
			c.binary(key)
		case int:
			c.integer(key)
		case Keys:
			c.array(key)
		}
	}
}

func (c *cbor) integer(value int) {
	if value < 0 {
		c.head(majorNegative, uint64(-1-value))
		return
	}
	c.head(majorUnsigned, uint64(value))
}

func (c *cbor) binary(data []byte) {
	c.head(majorBytes, uint64(len(data)))
	c.out = append(c.out, data...)
}

func (c *cbor) text(text string) {
	c.head(majorText, uint64(len(text)))
	c.out = append(c.out, text...)
}

// head writes a major type and its argument, as short as it can be.
func (c *cbor) head(major byte, argument uint64) {
	switch {
	case argument < 24:
		c.out = append(c.out, major|byte(argument))
	case argument < 1<<8:
		c.out = append(c.out, major|24, byte(argument))
	case argument < 1<<16:
		c.out = binary.BigEndian.AppendUint16(append(c.out, major|25), uint16(argument))
	case argument < 1<<32:
		c.out = binary.BigEndian.AppendUint32(append(c.out, major|26), uint32(argument))
	default:
		c.out = binary.BigEndian.AppendUint64(append(c.out, major|27), argument)
	}
}

// pickle writes what Python's pickle.dumps writes for a few types, with the protocol 5
// that vLLM's HIGHEST_PROTOCOL is in all its Pythons.
type pickle struct {
	out []byte
	// memoized counts objects that Python has put into its memo, shared notes where
	// those are that Python has once only: to write them again is to refer to them.
	memoized int
	shared   []sharedString
	frame    int // where the head of the last frame is
}

type sharedString struct {
	text  string
	index int
}

const (
	opMemoize = 0x94
	// frameHead is that of a frame: its length follows the first byte.
	frameHead = "\x95\x00\x00\x00\x00\x00\x00\x00\x00"
	// frameBytes end a frame, and what is as long alone is in none.
	frameBytes = 1 << 16
	// minFrame bytes are worth a frame.
	minFrame = 4
)

func (p *pickle) begin() {
	p.out = append(p.out[:0], "\x80\x05"...)
	p.openFrame()
	p.memoized = 0
	p.shared = p.shared[:0]
}

func (p *pickle) end() []byte {
	p.out = append(p.out, '.')
	p.closeFrame()
	return p.out
}

func (p *pickle) openFrame() {
	p.frame = len(p.out)
	p.out = append(p.out, frameHead...)
}

func (p *pickle) closeFrame() {
	framed := p.out[p.frame+len(frameHead):]
	if len(framed) < minFrame {
		p.out = append(p.out[:p.frame], framed...)
		return
	}
	binary.LittleEndian.PutUint64(p.out[p.frame+1:], uint64(len(framed)))
}

// splitFrame begins another frame if this one is long, as Python does before each object.
func (p *pickle) splitFrame() {
	if len(p.out)-p.frame-len(frameHead) >= frameBytes {
		p.closeFrame()
		p.openFrame()
	}
}

func (p *pickle) seed(seed string) []byte {
	p.begin()
	p.text(seed)
	return p.end()
}

func (p *pickle) block(parent []byte, ids []uint32, extra Keys) []byte {
	p.begin()
	p.binary(parent)
	p.ids(ids)
	if extra == nil {
		p.out = append(p.out, 'N')
	} else {
		p.tuple(extra)
	}
	p.out = append(p.out, 0x87) // a tuple of the last three
	p.memoize()
	return p.end()
}

func (p *pickle) memoize() {
	p.out = append(p.out, opMemoize)
	p.memoized++
}

func (p *pickle) binary(data []byte) { payload(p, 'C', 'B', data) }

// payload writes bytes or text.
func payload[T string | []byte](p *pickle, short, long byte, data T) {
	if len(data) >= frameBytes {
		p.closeFrame()
	}
	p.sized(short, long, len(data))
	p.out = append(p.out, data...)
	if len(data) >= frameBytes {
		p.openFrame()
	}
	p.memoize()
}

// text writes a string. Python has a constant, and a string of one character, once.
func (p *pickle) text(text string) {
	once := len(text) < 2 || isTag(text)
	for _, one := range p.shared {
		if once && one.text == text {
			p.sized('h', 'j', one.index)
			return
		}
	}
	if once {
		p.shared = append(p.shared, sharedString{text, p.memoized})
	}
	payload(p, 0x8c, 'X', text)
}

// sized writes a length, or a place in the memo, in one byte or in four.
func (p *pickle) sized(short, long byte, size int) {
	if size < 256 {
		p.out = append(p.out, short, byte(size))
		return
	}
	p.out = binary.LittleEndian.AppendUint32(append(p.out, long), uint32(size))
}

func (p *pickle) ids(ids []uint32) {
	long := p.openTuple(len(ids))
	for _, id := range ids {
		p.integer(int64(id))
	}
	p.closeTuple(len(ids), long)
}

func (p *pickle) tuple(keys Keys) {
	long := p.openTuple(len(keys))
	for _, key := range keys {
		p.splitFrame()
		switch key := key.(type) {
		case string:
			p.text(key)
		case []byte:
			p.binary(key)
		case int:
			p.integer(int64(key))
		case Keys:
			p.tuple(key)
		}
	}
	p.closeTuple(len(keys), long)
}

// openTuple begins a tuple. Those of up to three items need no mark.
func (p *pickle) openTuple(items int) (long bool) {
	if items > 3 {
		p.out = append(p.out, '(')
	}
	return items > 3
}

func (p *pickle) closeTuple(items int, long bool) {
	if items == 0 {
		p.out = append(p.out, ')')
		return
	}
	if long {
		p.out = append(p.out, 't')
	} else {
		p.out = append(p.out, 0x84+byte(items))
	}
	p.memoize()
}

func (p *pickle) integer(value int64) {
	switch {
	case 0 <= value && value < 1<<8:
		p.out = append(p.out, 'K', byte(value))
	case 0 <= value && value < 1<<16:
		p.out = append(p.out, 'M', byte(value), byte(value>>8))
	case -1<<31 <= value && value < 1<<31:
		p.out = binary.LittleEndian.AppendUint32(append(p.out, 'J'), uint32(value))
	default: // ids from 2^31 to 2^32 need five bytes, for the sign
		p.out = append(p.out, 0x8a, 5, byte(value), byte(value>>8), byte(value>>16), byte(value>>24), byte(value>>32))
	}
}
