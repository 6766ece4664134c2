// SPDX-License-Identifier: Apache-2.0

package events

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
)

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
