// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"unsafe"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
	"kvtax/kvindex/cmd/kvindexd/fleet"
)

// A prompt is what a JSON body asks for.
type prompt struct {
	TokenIDs    tokenIDs     `json:"token_ids"`
	BlockHashes []hashName   `json:"block_hashes"`
	Model       string       `json:"model"`
	LoRA        string       `json:"lora"`
	LoRAPath    string       `json:"lora_path"`
	CacheSalt   string       `json:"cache_salt"`
	Images      []imageInput `json:"images"`
}

type imageInput struct {
	ID     string `json:"id"`
	Offset int    `json:"offset"`
	Tokens int    `json:"tokens"`
}

// queries reads what a request asks for, and whether it is a batch. One prompt is its
// token ids alone, as a JSON array or as little-endian numbers of four bytes.
func (w *worker) queries(r *http.Request, maxBytes int64) (queries []fleet.Query, batch bool, err error) {
	body, err := w.read(http.MaxBytesReader(nil, r.Body, maxBytes))
	if err != nil {
		return nil, false, err
	}
	if kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind == "application/octet-stream" {
		if len(body)%4 != 0 {
			return nil, false, fmt.Errorf("a body of %d bytes: each token id takes 4", len(body))
		}
		ids := w.memory[:len(body)/4]
		toNative(ids)
		query, err := queryOf(ids, r.URL.Query())
		return []fleet.Query{query}, false, err
	}
	if rest := skipBlanks(body); len(rest) > 0 && rest[0] == '[' {
		w.ids, rest, err = parseIDs(w.ids[:0], rest)
		if err == nil && len(skipBlanks(rest)) > 0 {
			err = errors.New("something follows the array of token ids")
		}
		if err != nil {
			return nil, false, err
		}
		query, err := queryOf(w.ids, r.URL.Query())
		return []fleet.Query{query}, false, err
	}
	queries, err = readBatch(body)
	return queries, true, err
}

// read returns the body, in w's memory.
func (w *worker) read(body io.Reader) ([]byte, error) {
	const room = 1 << 10
	filled := 0
	for {
		if len(w.memory) < filled/4+room {
			w.memory = append(w.memory, make([]uint32, max(room, len(w.memory)))...)
		}
		n, err := body.Read(bytesOf(w.memory)[filled:])
		filled += n
		if err == io.EOF {
			return bytesOf(w.memory)[:filled], nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// bytesOf returns the memory of ids.
func bytesOf(ids []uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(ids))), 4*len(ids))
}

// toNative makes numbers of what was read as little-endian bytes: nothing to do on most
// machines.
func toNative(ids []uint32) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) == 1 {
		return
	}
	for i, id := range ids {
		ids[i] = binary.LittleEndian.Uint32(binary.NativeEndian.AppendUint32(nil, id))
	}
}

func queryOf(ids []uint32, params url.Values) (fleet.Query, error) {
	p := prompt{
		TokenIDs: ids, Model: params.Get("model"),
		LoRA: params.Get("lora"), LoRAPath: params.Get("lora_path"), CacheSalt: params.Get("cache_salt"),
	}
	return p.query()
}

func readBatch(body []byte) ([]fleet.Query, error) {
	var request struct {
		Prompts []prompt `json:"prompts"`
	}
	if err := json.Unmarshal(body, &request); err != nil {
		return nil, fmt.Errorf(`{"prompts": [...]}, or an array of token ids, is needed: %w`, err)
	}
	if n := len(request.Prompts); n < 1 || n > maxPrompts {
		return nil, fmt.Errorf("%d prompts: 1 to %d are possible", n, maxPrompts)
	}
	var queries []fleet.Query
	for _, prompt := range request.Prompts {
		if len(prompt.TokenIDs) > 0 && len(prompt.BlockHashes) > 0 {
			return nil, errors.New("a prompt with token_ids and block_hashes: one of them is needed")
		}
		query, err := prompt.query()
		if err != nil {
			return nil, err
		}
		queries = append(queries, query)
	}
	return queries, nil
}

const (
	// maxTextBytes bounds what is hashed for each block.
	maxTextBytes = 1024
	// maxCover is how often images may cover a prompt: those of a video and its sound do
	// so twice.
	maxCover = 4
)

func (p *prompt) query() (fleet.Query, error) {
	q := fleet.Query{
		IDs:   p.TokenIDs,
		Model: p.Model,
		Extra: blockhash.Extra{LoRA: p.LoRA, LoRAPath: p.LoRAPath, Salt: p.CacheSalt},
	}
	for _, hash := range p.BlockHashes {
		q.Names = append(q.Names, uint64(hash))
	}
	if max(len(p.LoRA), len(p.LoRAPath)) > maxTextBytes {
		return q, fmt.Errorf("a lora or lora_path of more than %d bytes", maxTextBytes)
	}
	covered := 0
	for n, image := range p.Images {
		if image.Offset < 0 || image.Tokens < 1 || len(image.ID) > maxTextBytes {
			return q, fmt.Errorf("images[%d]: an offset of 0 or more, 1 token or more, and an id of up to %d bytes are needed", n, maxTextBytes)
		}
		image.Tokens = min(image.Tokens, len(p.TokenIDs)-image.Offset)
		if image.Tokens < 1 {
			continue // in none of its blocks
		}
		covered += image.Tokens
		q.Extra.Images = append(q.Extra.Images, blockhash.Image(image))
	}
	if covered > maxCover*len(p.TokenIDs) {
		return q, fmt.Errorf("the images cover %d tokens of a prompt of %d: up to %d times is possible", covered, len(p.TokenIDs), maxCover)
	}
	slices.SortStableFunc(q.Extra.Images, func(a, b blockhash.Image) int { return a.Offset - b.Offset })
	return q, nil
}

// A hashName is a block's name: from its hash in hex, or from the number that vLLM makes
// of its last 8 bytes.
type hashName uint64

func (h *hashName) UnmarshalJSON(text []byte) error {
	if len(text) > 0 && text[0] != '"' {
		return json.Unmarshal(text, (*uint64)(h))
	}
	var digits string
	if err := json.Unmarshal(text, &digits); err != nil {
		return err
	}
	hash, err := hex.DecodeString(digits)
	if err != nil || len(hash) < 8 {
		return fmt.Errorf("%.80q is no block hash in hex", digits)
	}
	*h = hashName(blockhash.Name(hash))
	return nil
}

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

// parseIDs appends the numbers of the JSON array that text begins with, and returns what
// is after it.
func parseIDs(ids []uint32, text []byte) ([]uint32, []byte, error) {
	if len(text) == 0 || text[0] != '[' {
		return ids, text, errors.New("no array of token ids")
	}
	at := blanks(text, 1)
	if at < len(text) && text[at] == ']' {
		return ids, text[at+1:], nil
	}
	for {
		first := at
		id, digits := leadingNumber(text[at:])
		if at += digits; at == first || id > math.MaxUint32 || at > first+1 && text[first] == '0' {
			return ids, text, fmt.Errorf("no token id: %.20q", text[first:])
		}
		ids = append(ids, uint32(id))
		if at = blanks(text, at); at == len(text) {
			return ids, text, errors.New("the array of token ids is cut off")
		}
		switch text[at] {
		case ',':
			at = blanks(text, at+1)
		case ']':
			return ids, text[at+1:], nil
		default:
			return ids, text, fmt.Errorf("token id %d is followed by %q", len(ids)-1, text[at])
		}
	}
}

// leadingNumber returns the number that text begins with, and how many digits it has: 11
// for all that are longer. Up to 7 are read at once, as each loop that ends after another
// number of turns costs more than all of that.
func leadingNumber(text []byte) (number uint64, digits int) {
	if len(text) >= 8 {
		// A byte is a digit if it is below 10 without its '0'.
		eight := binary.LittleEndian.Uint64(text) ^ 0x3030303030303030
		others := (eight + 0x7676767676767676 | eight) & 0x8080808080808080
		if others != 0 {
			digits = bits.TrailingZeros64(others) / 8
			eight <<= 64 - 8*digits // zeros before them, to make it eight digits
			eight = eight * 2561 >> 8 & 0x00ff00ff00ff00ff
			eight = eight * 6553601 >> 16 & 0x0000ffff0000ffff
			return eight * 42949672960001 >> 32, digits
		}
	}
	for digits < len(text) && digits < 11 && text[digits]-'0' <= 9 {
		number = 10*number + uint64(text[digits]-'0')
		digits++
	}
	return number, digits
}

// blanks returns where the blanks of text end that begin at a place.
func blanks(text []byte, at int) int {
	for at < len(text) && (text[at] == ' ' || text[at] == '\n' || text[at] == '\t' || text[at] == '\r') {
		at++
	}
	return at
}

func skipBlanks(text []byte) []byte { return text[blanks(text, 0):] }

// appendAnswer appends what the instances hold of one prompt, as JSON.
func (s *Server) appendAnswer(out []byte, holdings []fleet.Holding) []byte {
	out = append(out, `{"instances":[`...)
	for n := range holdings {
		h := &holdings[n]
		if n > 0 {
			out = append(out, ',')
		}
		out = append(append(out, `{"name":`...), s.names[n]...)
		out = appendNumber(out, `,"block_tokens":`, h.BlockTokens)
		out = appendNumber(out, `,"blocks":`, h.Blocks)
		out = appendNumber(out, `,"tokens":`, h.Blocks*h.BlockTokens)
		if h.Further > 0 {
			out = append(out, `,"medium":`...)
			out = strconv.AppendQuoteToASCII(out, h.MediumName())
			out = appendNumber(out, `,"further_blocks":`, h.Further)
		}
		out = append(out, `,"score":`...)
		out = append(strconv.AppendFloat(out, h.Score(), 'f', -1, 64), '}')
	}
	return append(out, "]}"...)
}

func appendNumber(out []byte, name string, value int) []byte {
	return strconv.AppendInt(append(out, name...), int64(value), 10)
}
