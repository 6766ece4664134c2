// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"sync"

	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents/engineadapter"
)

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
	for _, one := range instances {
		// One worker: llm-d takes the events of one pod in turn, too.
		pool := kvevents.NewPool(&kvevents.Config{Concurrency: 1}, f.indexer.KVBlockIndex(), tokens,
			&named{engineadapter.NewVLLMAdapter(), one.Name, &f.adapters})
		pool.Start(ctx)
		context.AfterFunc(ctx, func() { pool.Shutdown(context.WithoutCancel(ctx)) })
		subscribers := kvevents.NewSubscriberManager(pool)
		if err := subscribers.EnsureSubscriber(ctx, one.Name, one.Events, "", true); err != nil {
			return nil, fmt.Errorf("subscriber of %s: %w", one.Name, err)
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
