// SPDX-License-Identifier: Apache-2.0

// Package router is llm-d's precise-prefix-cache-scorer over an index of one's choice.
//
// llm-d's own scorer makes its index itself, from a configuration that knows four kinds. So
// this one is put together from the same public parts: llm-d's token processor, KV-event
// pool, subscriber, vLLM adapter and block scorer, behind the interface that llm-d's router
// has for scorers. Ours is how they are joined, and normalised, which llm-d keeps to itself.
package router

import (
	"context"
	"fmt"
	"math"

	"github.com/llm-d/llm-d-inference-scheduler/pkg/plugins/preparedata"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents/engineadapter"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/plugin"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/scheduling"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/plugins/scheduling/scorer/prefix"
)

// Type is the plugin's, under which llm-d's router knows it.
const Type = "kvindex-prefix-cache-scorer"

// A Scorer prefers endpoints that hold the leading blocks of a prompt. It takes the prompt's
// token ids from the cycle's state, where llm-d's tokenizer plugin leaves them.
type Scorer struct {
	tokens kvblock.TokenProcessor
	index  kvblock.Index
	blocks kvcache.KVBlockScorer
}

var _ scheduling.Scorer = (*Scorer)(nil)

// New returns a scorer over an index, which follows the KV events that come in at
// events.ZMQEndpoint until ctx is done. Publishers connect to that. A nil tokens is
// llm-d's default.
func New(
	ctx context.Context, index kvblock.Index, tokens *kvblock.TokenProcessorConfig, events *kvevents.Config,
) (*Scorer, error) {
	processor, err := kvblock.NewChunkedTokenDatabase(tokens)
	if err != nil {
		return nil, fmt.Errorf("token processor: %w", err)
	}
	blocks, err := kvcache.NewKVBlockScorer(kvcache.DefaultKVBlockScorerConfig())
	if err != nil {
		return nil, fmt.Errorf("block scorer: %w", err)
	}
	pool := kvevents.NewPool(events, index, processor, engineadapter.NewVLLMAdapter())
	pool.Start(ctx)
	subscribers := kvevents.NewSubscriberManager(pool)
	err = subscribers.EnsureSubscriber(ctx, "all", events.ZMQEndpoint, events.TopicFilter, false)
	if err != nil {
		return nil, fmt.Errorf("subscriber: %w", err)
	}
	return &Scorer{processor, index, blocks}, nil
}

// TypedName is part of the interface of plugins.
func (s *Scorer) TypedName() plugin.TypedName { return plugin.TypedName{Type: Type, Name: Type} }

// Category is that of llm-d's scorer.
func (s *Scorer) Category() scheduling.ScorerCategory { return scheduling.Affinity }

// Score returns a number from 0 to 1 for each endpoint; nil if nothing can be said. It
// leaves the leading blocks of each endpoint in the cycle's state, as llm-d's does.
func (s *Scorer) Score(
	ctx context.Context, cycle *scheduling.CycleState, request *scheduling.LLMRequest, endpoints []scheduling.Endpoint,
) map[scheduling.Endpoint]float64 {
	prompt, err := scheduling.ReadCycleStateKey[*preparedata.TokenizedPromptState](
		cycle, preparedata.TokenizedPromptStateKey)
	if request == nil || err != nil || len(prompt.TokenIDs) == 0 {
		log.FromContext(ctx).Error(err, "no request with token ids to score")
		return nil
	}
	held, err := s.Blocks(ctx, prompt.TokenIDs, request.TargetModel)
	if err != nil {
		log.FromContext(ctx).Error(err, "the prompt cannot be looked up")
		return nil
	}
	state := &prefix.SchedulingContextState{PrefixCacheServers: map[prefix.ServerID]int{}}
	for _, endpoint := range endpoints {
		if blocks := held[address(endpoint)]; blocks > 0 {
			state.PrefixCacheServers[prefix.ServerID(endpoint.GetMetadata().NamespacedName)] = int(blocks)
		}
	}
	cycle.Write(plugin.StateKey(s.TypedName().String()), state)
	return normalised(endpoints, held)
}

// Blocks returns how many leading blocks of a prompt each pod holds, weighted by where.
func (s *Scorer) Blocks(ctx context.Context, ids []uint32, model string) (map[string]float64, error) {
	keys, err := s.tokens.TokensToKVBlockKeys(kvblock.EmptyBlockHash, ids, model, nil)
	if err != nil || len(keys) == 0 {
		return nil, err
	}
	pods, err := s.index.Lookup(ctx, keys, nil)
	if err != nil {
		return nil, err
	}
	return s.blocks.Score(ctx, keys, pods)
}

// normalised puts what pods hold between 0, for the one with least or an endpoint with
// nothing, and 1.
func normalised(endpoints []scheduling.Endpoint, held map[string]float64) map[scheduling.Endpoint]float64 {
	scores := make(map[scheduling.Endpoint]float64, len(endpoints))
	least, most := math.Inf(1), math.Inf(-1)
	for _, blocks := range held {
		least, most = min(least, blocks), max(most, blocks)
	}
	for _, endpoint := range endpoints {
		blocks, ok := held[address(endpoint)]
		switch {
		case !ok:
			scores[endpoint] = 0
		case least == most:
			scores[endpoint] = 1
		default:
			scores[endpoint] = (blocks - least) / (most - least)
		}
	}
	return scores
}

// address is the name under which an endpoint's pod publishes.
func address(endpoint scheduling.Endpoint) string {
	metadata := endpoint.GetMetadata()
	return metadata.Address + ":" + metadata.Port
}
