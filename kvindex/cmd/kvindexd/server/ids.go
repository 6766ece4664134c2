// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"math"
)

// tokenIDs is read in a tenth of the time that encoding/json takes for a []uint32.
type tokenIDs []uint32

func (t *tokenIDs) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	ids, _, err := parseIDs(nil, text)
	*t = ids
	return err
}

var errCut = errors.New("the array of token ids is cut off")

// parseIDs appends the numbers of the JSON array that text begins with, and returns what
// is after it.
func parseIDs(ids []uint32, text []byte) ([]uint32, []byte, error) {
	if len(text) == 0 || text[0] != '[' {
		return ids, text, errors.New("no array of token ids")
	}
	text = skipBlanks(text[1:])
	if len(text) > 0 && text[0] == ']' {
		return ids, text[1:], nil
	}
	for {
		id, digits := uint64(0), 0
		for digits < len(text) && digits < 11 && '0' <= text[digits] && text[digits] <= '9' {
			id = 10*id + uint64(text[digits]-'0')
			digits++
		}
		if digits == 0 || id > math.MaxUint32 || digits > 1 && text[0] == '0' {
			return ids, text, fmt.Errorf("no token id: %.20q", text)
		}
		ids = append(ids, uint32(id))
		text = skipBlanks(text[digits:])
		if len(text) == 0 {
			return ids, text, errCut
		}
		end := text[0]
		text = text[1:]
		if end == ']' {
			return ids, text, nil
		}
		if end != ',' {
			return ids, text, fmt.Errorf("token id %d is followed by %q", len(ids)-1, end)
		}
		text = skipBlanks(text)
	}
}

func skipBlanks(text []byte) []byte {
	for len(text) > 0 && (text[0] == ' ' || text[0] == '\n' || text[0] == '\t' || text[0] == '\r') {
		text = text[1:]
	}
	return text
}
