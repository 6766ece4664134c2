// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"mime"
	"net/http"
	"sync"

	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents/engineadapter"
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
	params := r.URL.Query()
	model := params.Get("lora")
	if model == "" {
		model = params.Get("model")
	}
	blocks, err := f.blocks(r.Context(), ids, model)
	if err != nil {
		answer(w, http.StatusInternalServerError, map[string]string{"error": err.Error()})
		return
	}
	holdings := make([]holding, len(f.instances))
	for n, instance := range f.instances {
		score := blocks[instance.Name]
		holdings[n] = holding{instance.Name, instance.BlockTokens, int(math.Round(score * float64(instance.BlockTokens))), score}
	}
	answer(w, http.StatusOK, map[string]any{"instances": holdings})
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
	for n, instance := range f.instances {
		states[n] = state{Name: instance.Name, BlockTokens: instance.BlockTokens}
	}
	answer(w, http.StatusOK, map[string]any{"instances": states})
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(body) // who asked may be gone
}

// A fleet is instances, and llm-d's index of what they hold.
type fleet struct {
	instances []instance
	indexer   *kvcache.Indexer
	adapters  sync.Map // names of LoRA adapters that there are blocks of
}

// follow follows the instances' events until ctx is done.
func follow(ctx context.Context, instances []instance, seed string) (*fleet, error) {
	tokens, err := kvblock.NewChunkedTokenDatabase(&kvblock.TokenProcessorConfig{
		BlockSizeTokens: instances[0].BlockTokens, HashSeed: seed,
	})
	if err != nil {
		return nil, fmt.Errorf("token processor: %w", err)
	}
	config, err := kvcache.NewDefaultConfig()
	if err != nil {
		return nil, err
	}
	f := &fleet{instances: instances}
	if f.indexer, err = kvcache.NewKVCacheIndexer(ctx, config, tokens); err != nil {
		return nil, fmt.Errorf("indexer: %w", err)
	}
	for _, instance := range instances {
		// One worker: llm-d takes the events of one pod in turn, too.
		pool := kvevents.NewPool(&kvevents.Config{Concurrency: 1}, f.indexer.KVBlockIndex(), tokens,
			&named{engineadapter.NewVLLMAdapter(), instance.Name, &f.adapters})
		pool.Start(ctx)
		context.AfterFunc(ctx, func() { pool.Shutdown(context.WithoutCancel(ctx)) })
		subscribers := kvevents.NewSubscriberManager(pool)
		if err := subscribers.EnsureSubscriber(ctx, instance.Name, instance.Events, "", true); err != nil {
			return nil, fmt.Errorf("subscriber of %s: %w", instance.Name, err)
		}
	}
	return f, nil
}

// named reads messages as llm-d does, but tells by their connection whose they are. llm-d
// takes that from a topic, kv@POD@MODEL, which an instance need not have.
type named struct {
	kvevents.EngineAdapter
	instance string
	adapters *sync.Map
}

func (n *named) ShardingKey(*kvevents.RawMessage) string { return n.instance }

func (n *named) ParseMessage(message *kvevents.RawMessage) (pod, model string, batch kvevents.EventBatch, err error) {
	_, _, batch, err = n.EngineAdapter.ParseMessage(message)
	for _, event := range batch.Events {
		if stored, ok := event.(*kvevents.BlockStoredEvent); ok && stored.LoraName != nil {
			n.adapters.Store(*stored.LoraName, true)
		}
	}
	return n.instance, "", batch, err
}

// blocks returns how many leading blocks of a prompt each instance holds, weighted as
// llm-d does: 1 in the GPU, 0.8 in memory. The model counts if it is an adapter's name.
func (f *fleet) blocks(ctx context.Context, ids []uint32, model string) (map[string]float64, error) {
	if len(ids) > 0 {
		ids = ids[:len(ids)-1] // vLLM computes at least one
	}
	if _, ok := f.adapters.Load(model); !ok {
		model = ""
	}
	return f.indexer.ScoreTokens(ctx, ids, model, nil, nil)
}
