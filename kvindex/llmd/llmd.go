// SPDX-License-Identifier: Apache-2.0

// Package llmd is kvindex behind the Index interface of llm-d-kv-cache v0.9.0.
//
// It does what upstream's in-memory index does, with the same configuration and the same
// errors, apart from two things. Of too many pods at one key those are dropped that
// added nothing to any key for longest, not to this one. And the pods that Lookup
// returns are shared: callers may append to them but not change them.
package llmd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/kvtax/kvtax/kvindex"
)

// An Index tells which pods hold which KV-cache blocks. Lookup takes no lock; the other
// methods take turns.
type Index struct {
	pods *kvindex.Index[kvblock.PodEntry]

	mu         sync.Mutex // makes Add and Evict whole; it guards engineKeys
	engineKeys *simplelru.LRU[kvblock.BlockHash, requestKeys]
}

var _ kvblock.Index = (*Index)(nil)

// requestKeys are those of one engine key: the last, and what comes before it if an
// engine block is larger than a block of the index.
type requestKeys struct {
	before []kvblock.BlockHash
	last   kvblock.BlockHash
}

// New returns an empty index for as many keys, and pods at a key, as upstream's
// configuration says; upstream's default if config is nil. It is an error if one of them
// is not positive.
func New(config *kvblock.InMemoryIndexConfig) (*Index, error) {
	if config == nil {
		config = kvblock.DefaultInMemoryIndexConfig()
	}
	pods, err := kvindex.New[kvblock.PodEntry](kvindex.Config{
		Capacity:      config.Size,
		MaxPodsPerKey: config.PodCacheSize,
	})
	if err != nil {
		return nil, fmt.Errorf("llmd: %w", err)
	}
	engineKeys, err := simplelru.NewLRU[kvblock.BlockHash, requestKeys](config.Size, nil)
	if err != nil {
		return nil, fmt.Errorf("llmd: engine keys: %w", err)
	}
	return &Index{pods: pods, engineKeys: engineKeys}, nil
}

// Lookup returns the pods that hold each of the keys, of those named in podIdentifiers,
// or all if it is empty. It is an error to name no key.
func (x *Index) Lookup(
	_ context.Context, keys []kvblock.BlockHash, podIdentifiers sets.Set[string],
) (map[kvblock.BlockHash][]kvblock.PodEntry, error) {
	if len(keys) == 0 {
		return nil, errors.New("no requestKeys provided for lookup")
	}
	found := make(map[kvblock.BlockHash][]kvblock.PodEntry, len(keys))
	if podIdentifiers.Len() == 0 {
		for i, pods := range x.pods.Lookup(chain(keys), nil) {
			found[keys[i]] = pods
		}
		return found, nil
	}
	wanted := func(pod kvblock.PodEntry) bool { return podIdentifiers.Has(pod.PodIdentifier) }
	for i, pods := range x.pods.Lookup(chain(keys), wanted) {
		found[keys[i]] = append([]kvblock.PodEntry(nil), pods...)
	}
	return found, nil
}

// Add notes that entries hold the blocks of the request keys, and which request keys
// each engine key stands for: one or several, or the same as its neighbours', by the
// ratio of the numbers of keys. Engine keys are nil where none is known yet. It is an
// error to name no request key, no entry, or engine keys that are empty but not nil.
func (x *Index) Add(
	_ context.Context, engineKeys, keys []kvblock.BlockHash, entries []kvblock.PodEntry,
) error {
	if len(keys) == 0 || len(entries) == 0 {
		return errors.New("no keys or entries provided for adding to index")
	}
	if engineKeys != nil && len(engineKeys) == 0 {
		return errors.New("no engineKeys provided for adding to index: nil means that none is known")
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.noteEngineKeys(engineKeys, keys)
	x.pods.Add(chain(keys), entries...)
	return nil
}

func (x *Index) noteEngineKeys(engineKeys, keys []kvblock.BlockHash) {
	if engineKeys == nil {
		return
	}
	n := max(len(engineKeys), len(keys))
	var of requestKeys
	for i := range n {
		engineKey, key := engineKeys[i*len(engineKeys)/n], keys[i*len(keys)/n]
		if i > 0 && engineKey == engineKeys[(i-1)*len(engineKeys)/n] {
			of.before = append(of.before, of.last)
			of.last = key
		} else {
			of = requestKeys{last: key}
		}
		x.engineKeys.Add(engineKey, of)
	}
}

// Evict notes that entries no longer hold the block of a key; those of all its request
// keys if it is an engine key. An engine key is forgotten with the last entry. It is an
// error to name no entry, or a type of key that there is not.
func (x *Index) Evict(
	_ context.Context, key kvblock.BlockHash, keyType kvblock.KeyType, entries []kvblock.PodEntry,
) error {
	if len(entries) == 0 {
		return errors.New("no entries provided for eviction from index")
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	switch keyType {
	case kvblock.EngineKey:
		x.evictEngineKey(key, entries)
	case kvblock.RequestKey:
		x.pods.Evict(uint64(key), entries...)
	default:
		return fmt.Errorf("unknown key type: %d", keyType)
	}
	return nil
}

func (x *Index) evictEngineKey(engineKey kvblock.BlockHash, entries []kvblock.PodEntry) {
	of, ok := x.engineKeys.Get(engineKey)
	if !ok {
		return
	}
	held := x.pods.Evict(uint64(of.last), entries...)
	for _, key := range of.before {
		held = x.pods.Evict(uint64(key), entries...) || held
	}
	if !held {
		x.engineKeys.Remove(engineKey)
	}
}

// GetRequestKey returns the last request key of an engine key. It is an error if none is
// known.
func (x *Index) GetRequestKey(
	_ context.Context, engineKey kvblock.BlockHash,
) (kvblock.BlockHash, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	of, ok := x.engineKeys.Get(engineKey)
	if !ok {
		return kvblock.EmptyBlockHash, fmt.Errorf("engine key not found: %s", engineKey)
	}
	return of.last, nil
}

// Len returns the number of request keys held.
func (x *Index) Len() int { return x.pods.Len() }

// Clear notes that a pod holds nothing any more, on any device tier. Engine keys are
// kept, as upstream keeps them: the pod's next Add finds them right.
func (x *Index) Clear(_ context.Context, podIdentifier string) error {
	x.pods.ClearFunc(func(pod kvblock.PodEntry) bool { return pod.PodIdentifier == podIdentifier })
	return nil
}

// chain returns the same keys as another type.
func chain(keys []kvblock.BlockHash) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.SliceData(keys)), len(keys))
}
