// SPDX-License-Identifier: Apache-2.0

package events

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

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
