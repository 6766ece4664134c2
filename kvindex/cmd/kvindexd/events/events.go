// SPDX-License-Identifier: Apache-2.0

// Package events reads the KV events that vLLM publishes.
//
// A batch is a msgpack array: a time, a list of events, and the rank of the publisher.
// To vLLM 0.22 an event is an array of its tag and its fields in order, from 0.25 on a
// map with the tag under "type" (vllm/distributed/kv_events.py). Fields were added at the
// end. What is not known of an event is passed over, and so is an event of an unknown kind.
package events

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
)

// A Kind is what an event says.
type Kind uint8

const (
	Unknown Kind = iota // something that a later release may have
	Stored              // blocks became findable
	Removed             // blocks are no longer findable, one of each hash
	Cleared             // the prefix cache was reset
)

// GPU is the medium of an event that names none.
const GPU = "GPU"

// An Event is one of a batch. What it points to is valid until the next is read.
type Event struct {
	Kind   Kind
	Names  []uint64 // of the blocks, as blockhash.Name says
	Medium []byte
	Group  int // number of the KV cache group

	// Of stored blocks only.
	HasParent   bool // there is a block before the first
	BlockTokens int
	TokenIDs    TokenIDs
	Spec        []byte // kind of the group's KV cache, empty to vLLM 0.18
	Window      int    // tokens that its layers look back, 0 if that is not said
	LoRA        []byte // name of the adapter, empty for none
	Lookahead   bool   // the hashes cover tokens beyond their block
	// firstKeys are the extra keys of the first block, not decoded.
	firstKeys []byte
}

// A Decoder reads batches. It keeps buffers, so it is for one goroutine at a time.
type Decoder struct {
	// Rank is that of the data-parallel engine of the last batch, -1 if it names none.
	Rank  int64
	event Event
	names []uint64
}

// Decode calls take for each event of a batch, in order, and returns the first error of
// it or of the batch. Events before an error have been taken.
func (d *Decoder) Decode(batch []byte, take func(*Event) error) error {
	fields, b, err := msgp.ReadArrayHeaderBytes(batch)
	if err != nil {
		return fmt.Errorf("no batch of KV events: %w", err)
	}
	if fields < 2 {
		return fmt.Errorf("a batch of KV events with %d fields", fields)
	}
	if b, err = msgp.Skip(b); err != nil { // the time
		return err
	}
	count, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return err
	}
	for range count {
		if b, err = d.decode(b); err != nil {
			return err
		}
		if err := take(&d.event); err != nil {
			return err
		}
	}
	d.Rank = -1
	if fields > 2 && msgp.NextType(b) == msgp.IntType || fields > 2 && msgp.NextType(b) == msgp.UintType {
		d.Rank, _, err = msgp.ReadInt64Bytes(b)
	}
	return err
}

// decode reads the event that b begins with, and returns what is after it.
func (d *Decoder) decode(b []byte) ([]byte, error) {
	d.event = Event{}
	switch msgp.NextType(b) {
	case msgp.MapType:
		return d.decodeMap(b)
	case msgp.ArrayType:
		return d.decodeArray(b)
	}
	return msgp.Skip(b)
}

func (d *Decoder) decodeArray(b []byte) ([]byte, error) {
	count, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return b, err
	}
	if count == 0 {
		return b, nil
	}
	if b, err = d.tag(b); err != nil {
		return b, err
	}
	order := fieldsOf[d.event.Kind]
	for n := range int(count) - 1 {
		field := unknown
		if n < len(order) {
			field = order[n]
		}
		if b, err = d.field(field, b); err != nil {
			return b, err
		}
	}
	return b, nil
}

// decodeMap reads an event whose tag comes first, as msgspec writes it. Without that it is
// unknown.
func (d *Decoder) decodeMap(b []byte) ([]byte, error) {
	count, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return b, err
	}
	for n := range count {
		var key []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			return b, err
		}
		switch {
		case n == 0 && string(key) == "type":
			b, err = d.tag(b)
		case d.event.Kind != Unknown:
			b, err = d.field(fieldNamed[string(key)], b)
		default:
			b, err = msgp.Skip(b)
		}
		if err != nil {
			return b, err
		}
	}
	return b, nil
}

func (d *Decoder) tag(b []byte) ([]byte, error) {
	if msgp.NextType(b) != msgp.StrType {
		return msgp.Skip(b)
	}
	tag, b, err := msgp.ReadStringZC(b)
	if err != nil {
		return b, err
	}
	switch string(tag) {
	case "BlockStored":
		d.event.Kind = Stored
	case "BlockRemoved":
		d.event.Kind = Removed
	case "AllBlocksCleared":
		d.event.Kind = Cleared
	}
	return b, nil
}

// A field is one of an event's that counts here.
type field uint8

const (
	unknown field = iota
	hashes
	parent
	tokenIDs
	blockTokens
	medium
	loraName
	extraKeys
	group
	spec
	window
	lookahead
)

// fieldsOf gives the order of fields in arrays.
var fieldsOf = [...][]field{
	Unknown: nil,
	Stored: {hashes, parent, tokenIDs, blockTokens, unknown, medium, loraName,
		extraKeys, group, spec, window},
	Removed: {hashes, medium, group},
	Cleared: nil,
}

var fieldNamed = map[string]field{
	"block_hashes":                 hashes,
	"parent_block_hash":            parent,
	"token_ids":                    tokenIDs,
	"block_size":                   blockTokens,
	"medium":                       medium,
	"lora_name":                    loraName,
	"extra_keys":                   extraKeys,
	"group_idx":                    group,
	"kv_cache_spec_kind":           spec,
	"kv_cache_spec_sliding_window": window,
	"lookahead_token_ids":          lookahead,
}

func (d *Decoder) field(which field, b []byte) ([]byte, error) {
	e := &d.event
	if which == unknown || msgp.IsNil(b) {
		return msgp.Skip(b)
	}
	var err error
	before := b
	switch which {
	case hashes:
		b, err = d.hashes(b)
	case parent:
		e.HasParent = true
		b, err = msgp.Skip(b)
	case tokenIDs:
		e.TokenIDs, b, err = skipTokenIDs(b)
	case blockTokens:
		e.BlockTokens, b, err = msgp.ReadIntBytes(b)
	case medium:
		e.Medium, b, err = msgp.ReadStringZC(b)
	case loraName:
		e.LoRA, b, err = msgp.ReadStringZC(b)
	case extraKeys:
		e.firstKeys, b, err = skipKeys(b)
		if err != nil { // of another form than those of today
			e.firstKeys = before
			b, err = msgp.Skip(before)
		}
	case group:
		e.Group, b, err = msgp.ReadIntBytes(b)
	case spec:
		e.Spec, b, err = msgp.ReadStringZC(b)
	case window:
		e.Window, b, err = msgp.ReadIntBytes(b)
	case lookahead:
		e.Lookahead = true
		b, err = msgp.Skip(b)
	}
	return b, err
}

func (d *Decoder) hashes(b []byte) ([]byte, error) {
	count, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return b, err
	}
	d.names = d.names[:0]
	for range count {
		var name uint64
		if name, b, err = readName(b); err != nil {
			return b, err
		}
		d.names = append(d.names, name)
	}
	d.event.Names = d.names
	return b, nil
}

// readName reads a hash: bytes, or their end as a number.
func readName(b []byte) (uint64, []byte, error) {
	if msgp.NextType(b) != msgp.BinType {
		return msgp.ReadUint64Bytes(b)
	}
	hash, b, err := msgp.ReadBytesZC(b)
	return blockhash.Name(hash), b, err
}

// maxKeyDepth is more than vLLM has: an image is a tuple in the tuple of keys.
const maxKeyDepth = 4

// FirstKeys returns the extra keys of the first block, as published: without tags.
func (e *Event) FirstKeys() (blockhash.Keys, error) {
	if e.firstKeys == nil {
		return nil, nil
	}
	keys, _, err := readKeys(e.firstKeys, maxKeyDepth)
	return keys, err
}

// skipKeys returns the first of the lists of extra keys that b begins with, nil if it is
// null or there is none, and what is after all of them.
func skipKeys(b []byte) (first, rest []byte, err error) {
	count, b, err := msgp.ReadArrayHeaderBytes(b)
	for n := range count {
		if n == 0 && !msgp.IsNil(b) {
			first = b
		}
		if err == nil {
			b, err = msgp.Skip(b)
		}
	}
	return first, b, err
}

func readKeys(b []byte, depth int) (blockhash.Keys, []byte, error) {
	count, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, b, err
	}
	if depth == 0 {
		return nil, b, fmt.Errorf("extra keys more than %d deep", maxKeyDepth)
	}
	keys := blockhash.Keys{}
	for range count {
		var key any
		switch msgp.NextType(b) {
		case msgp.StrType:
			key, b, err = msgp.ReadStringBytes(b)
		case msgp.BinType:
			key, b, err = msgp.ReadBytesBytes(b, nil)
		case msgp.ArrayType:
			key, b, err = readKeys(b, depth-1)
		default:
			key, b, err = msgp.ReadIntBytes(b)
		}
		if err != nil {
			return nil, b, err
		}
		keys = append(keys, key)
	}
	return keys, b, nil
}

// TokenIDs are token ids that nobody has decoded yet: most events need none of them.
type TokenIDs struct {
	count   int
	encoded []byte
}

// Len returns their number.
func (t TokenIDs) Len() int { return t.count }

// Append appends the first n of them to ids.
func (t TokenIDs) Append(ids []uint32, n int) ([]uint32, error) {
	b := t.encoded
	for range min(n, t.count) {
		id, rest, err := msgp.ReadUint32Bytes(b)
		if err != nil {
			return ids, err
		}
		ids = append(ids, id)
		b = rest
	}
	return ids, nil
}

// skipTokenIDs returns the list that b begins with, and what is after it.
func skipTokenIDs(b []byte) (TokenIDs, []byte, error) {
	count, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return TokenIDs{}, b, err
	}
	end := 0
	for range count {
		if end >= len(b) {
			return TokenIDs{}, b, msgp.ErrShortBytes
		}
		size := sizeOfUint(b[end])
		if size == 0 {
			return TokenIDs{}, b, fmt.Errorf("a token id that is no number: 0x%x", b[end])
		}
		end += size
	}
	if end > len(b) {
		return TokenIDs{}, b, msgp.ErrShortBytes
	}
	return TokenIDs{int(count), b[:end]}, b[end:], nil
}

// sizeOfUint returns how many bytes the number takes whose first byte is given, 0 if it
// is none, or below 0.
func sizeOfUint(first byte) int {
	switch {
	case first < 0x80:
		return 1
	case 0xcc <= first && first <= 0xcf:
		return 1 + 1<<(first-0xcc)
	}
	return 0
}
