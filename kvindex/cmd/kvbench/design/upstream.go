// SPDX-License-Identifier: Apache-2.0

package design

import (
	"context"
	"io"
	"reflect"

	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
)

// upstream is an index with the interface of llm-d-kv-cache, called as its router and
// its KV-event pool call it.
type upstream struct {
	index kvblock.Index
	ctx   context.Context
}

func newUpstream(capacity, podsPerKey int) (Index, error) {
	index, err := kvblock.NewInMemoryIndex(upstreamConfig(capacity, podsPerKey))
	return upstream{index, production()}, err
}

func upstreamConfig(capacity, podsPerKey int) *kvblock.InMemoryIndexConfig {
	return &kvblock.InMemoryIndexConfig{Size: capacity, PodCacheSize: podsPerKey}
}

// production returns a context with the logger of upstream's binaries, at their default
// level and without an output: V(TRACE) is then a logger that is turned off. Without a
// logger in the context, controller-runtime hands out a global one that takes a lock to
// say so.
func production() context.Context {
	return log.IntoContext(context.Background(), zap.New(zap.UseDevMode(true), zap.WriteTo(io.Discard)))
}

// Add tells, as a KV event does, the engine's own hash of each block.
func (x upstream) Add(chain []uint64, pod string) {
	if len(chain) == 0 {
		return // upstream takes this for an error
	}
	engineKeys := make([]kvblock.BlockHash, len(chain))
	requestKeys := make([]kvblock.BlockHash, len(chain))
	for i, key := range chain {
		engineKeys[i], requestKeys[i] = engineKey(key), kvblock.BlockHash(key)
	}
	must(x.index.Add(x.ctx, engineKeys, requestKeys, entries(pod)))
}

func (x upstream) Evict(key uint64, pod string) {
	must(x.index.Evict(x.ctx, engineKey(key), kvblock.EngineKey, entries(pod)))
}

// engineKey stands for the hash that an engine gives a block.
func engineKey(key uint64) kvblock.BlockHash { return kvblock.BlockHash(^key) }

func entries(pod string) []kvblock.PodEntry {
	return []kvblock.PodEntry{{PodIdentifier: pod, DeviceTier: "gpu"}}
}

// must refuses errors: an index in memory has none for a call that is in order.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// Len returns the number of keys held. Upstream's index does not tell, so it is read off
// the map inside; then nothing else may use the index meanwhile.
func (x upstream) Len() int {
	return mapLen(reflect.ValueOf(x.index))
}

// mapLen follows InMemoryIndex.data, lru.Cache.lru and simplelru.LRU.items.
func mapLen(v reflect.Value) int {
	for v.Kind() != reflect.Map {
		switch v.Kind() {
		case reflect.Pointer, reflect.Interface:
			v = v.Elem()
		default:
			v = v.FieldByNameFunc(func(name string) bool {
				return name == "data" || name == "lru" || name == "items"
			})
		}
	}
	return v.Len()
}

func (x upstream) NewReader() Reader { return &upstreamReader{upstream: x} }

type upstreamReader struct {
	upstream
	keys  []kvblock.BlockHash
	found map[kvblock.BlockHash][]kvblock.PodEntry
}

// Lookup copies the keys, as the types differ: 8 bytes a block, nothing beside what
// follows.
func (r *upstreamReader) Lookup(chain []uint64) {
	r.keys, r.found = r.keys[:0], nil
	if len(chain) == 0 {
		return // upstream takes this for an error
	}
	for _, key := range chain {
		r.keys = append(r.keys, kvblock.BlockHash(key))
	}
	found, err := r.index.Lookup(r.ctx, r.keys, nil)
	must(err)
	r.found = found
}

func (r *upstreamReader) Prefix() int {
	held := map[string]int{}
	for n, key := range r.keys {
		more := false
		for _, entry := range r.found[key] {
			if held[entry.PodIdentifier] == n {
				held[entry.PodIdentifier]++
				more = true
			}
		}
		if !more {
			return n
		}
	}
	return len(r.keys)
}
