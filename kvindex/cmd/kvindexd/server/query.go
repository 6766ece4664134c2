// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
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
func (w *worker) queries(r *http.Request, maxBytes int64) (found []fleet.Query, batch bool, err error) {
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
		return []fleet.Query{queryOf(ids, r.URL.Query())}, false, nil
	}
	if rest := skipBlanks(body); len(rest) > 0 && rest[0] == '[' {
		w.ids, rest, err = parseIDs(w.ids[:0], rest)
		if err == nil && len(skipBlanks(rest)) > 0 {
			err = errors.New("something follows the array of token ids")
		}
		return []fleet.Query{queryOf(w.ids, r.URL.Query())}, false, err
	}
	found, err = readBatch(body)
	return found, true, err
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

func queryOf(ids []uint32, asked url.Values) fleet.Query {
	extra := blockhash.Extra{
		LoRA: asked.Get("lora"), LoRAPath: asked.Get("lora_path"), Salt: asked.Get("cache_salt"),
	}
	return fleet.Query{IDs: ids, Model: asked.Get("model"), Extra: extra}
}

func readBatch(body []byte) ([]fleet.Query, error) {
	var asked struct {
		Prompts []prompt `json:"prompts"`
	}
	if err := json.Unmarshal(body, &asked); err != nil {
		return nil, fmt.Errorf(`{"prompts": [...]}, or an array of token ids, is needed: %w`, err)
	}
	if n := len(asked.Prompts); n < 1 || n > maxPrompts {
		return nil, fmt.Errorf("%d prompts: 1 to %d are possible", n, maxPrompts)
	}
	var found []fleet.Query
	for _, one := range asked.Prompts {
		if len(one.TokenIDs) > 0 && len(one.BlockHashes) > 0 {
			return nil, errors.New("a prompt with token_ids and block_hashes: one of them is needed")
		}
		found = append(found, one.query())
	}
	return found, nil
}

func (p *prompt) query() fleet.Query {
	q := fleet.Query{
		IDs:   p.TokenIDs,
		Model: p.Model,
		Extra: blockhash.Extra{LoRA: p.LoRA, LoRAPath: p.LoRAPath, Salt: p.CacheSalt},
	}
	for _, hash := range p.BlockHashes {
		q.Names = append(q.Names, uint64(hash))
	}
	for _, image := range p.Images {
		q.Extra.Images = append(q.Extra.Images, blockhash.Image(image))
	}
	slices.SortStableFunc(q.Extra.Images, func(a, b blockhash.Image) int { return a.Offset - b.Offset })
	return q
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
