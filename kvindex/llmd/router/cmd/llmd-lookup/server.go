// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"mime"
	"net/http"
)

// maxBodyBytes is kvindexd's default.
const maxBodyBytes = 16 << 20

// A holding is what one instance holds of a prompt: llm-d's score, and that in tokens.
type holding struct {
	Name        string  `json:"name"`
	BlockTokens int     `json:"block_tokens"`
	Tokens      int     `json:"tokens"`
	Score       float64 `json:"score"`
}

// A state is what /healthz says of an instance. llm-d's code notices no gap in the events,
// so that nobody knows whether it has them all; nor does its index count.
type state struct {
	Name          string         `json:"name"`
	Complete      bool           `json:"complete"`
	Gaps          int            `json:"gaps"`
	SkippedBlocks int            `json:"skipped_blocks"`
	BlockTokens   int            `json:"block_tokens"`
	Blocks        map[string]int `json:"blocks"`
}

func handler(f *fleet) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", f.health)
	mux.HandleFunc("POST /v1/lookup", f.lookup)
	return mux
}

func (f *fleet) lookup(w http.ResponseWriter, r *http.Request) {
	ids, err := readIDs(r)
	if err != nil {
		status := http.StatusBadRequest
		if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
			status = http.StatusRequestEntityTooLarge
		}
		answer(w, status, map[string]string{"error": err.Error()})
		return
	}
	asked := r.URL.Query()
	model := asked.Get("lora")
	if model == "" {
		model = asked.Get("model")
	}
	blocks, err := f.blocks(r.Context(), ids, model)
	if err != nil {
		answer(w, http.StatusInternalServerError, map[string]string{"error": err.Error()})
		return
	}
	found := make([]holding, len(f.instances))
	for n, one := range f.instances {
		score := blocks[one.Name]
		found[n] = holding{one.Name, one.BlockTokens, int(math.Round(score * float64(one.BlockTokens))), score}
	}
	answer(w, http.StatusOK, map[string]any{"instances": found})
}

// readIDs reads a prompt: a JSON array, or little-endian numbers of four bytes.
func readIDs(r *http.Request) (ids []uint32, err error) {
	body, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxBodyBytes))
	if err != nil {
		return nil, err
	}
	if kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind != "application/octet-stream" {
		if err := json.Unmarshal(body, &ids); err != nil {
			return nil, fmt.Errorf("an array of token ids is needed: %w", err)
		}
		return ids, nil
	}
	if len(body)%4 != 0 {
		return nil, fmt.Errorf("a body of %d bytes: each token id takes 4", len(body))
	}
	ids = make([]uint32, len(body)/4)
	for n := range ids {
		ids[n] = binary.LittleEndian.Uint32(body[4*n:])
	}
	return ids, nil
}

func (f *fleet) health(w http.ResponseWriter, _ *http.Request) {
	states := make([]state, len(f.instances))
	for n, one := range f.instances {
		states[n] = state{Name: one.Name, BlockTokens: one.BlockTokens}
	}
	answer(w, http.StatusOK, map[string]any{"instances": states})
}

func answer(w http.ResponseWriter, status int, said any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(said) // who asked may be gone
}
