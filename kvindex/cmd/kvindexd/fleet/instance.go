// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
	"kvtax/kvindex/cmd/kvindexd/events"
	"kvtax/kvindex/cmd/kvindexd/feed"
	"kvtax/kvindex/cmd/kvindexd/names"
)

// A HashStatus is the hash algorithm of an instance, or why that is not known.
type HashStatus string

const (
	// HashPending: the instance has not stored the first block of a prompt yet.
	HashPending HashStatus = "not told yet"
	// HashUnrecognized: no known algorithm and seed give the instance's hashes. Its blocks
	// are not kept, as no prompt could ever be found in it.
	HashUnrecognized HashStatus = "another seed"
)

// An Instance takes the KV events of one vLLM. It is a feed.Taker.
type Instance struct {
	Name   string
	Source feed.Source
	fleet  *Fleet
	number uint16
	log    *slog.Logger

	// answers is how its blocks are named while there is an answer to give: the scheme is
	// known, and the state is that of a publisher that is connected.
	answers atomic.Pointer[names.HashScheme]
	// tiered is set once it held a block elsewhere than in the GPU.
	tiered atomic.Bool

	mu        sync.Mutex
	decoder   events.Decoder
	ids       []uint32
	fresh     []uint64
	state     state
	connected bool
	why       string // it is not connected, or was dropped last
	counts    Counts
}

// state is what a snapshot keeps of an instance, beside its blocks.
type state struct {
	Position   feed.Position
	Complete   bool
	Naming     HashStatus
	HashScheme names.HashScheme
	// Refcounts counts the further blocks of the same hash in the same place: a hash is
	// gone with the last of them.
	Refcounts map[place]uint32
	// Held counts the different blocks in each medium.
	Held [maxMedia]int
}

// A place is a block in a medium.
type place struct {
	Name   uint64
	Medium uint8
}

// Counts are what has happened since the start.
type Counts struct {
	Batches uint64 // taken
	Events  uint64
	Gaps    uint64 // times that batches did not come by themselves
	Missed  uint64 // such batches
	Dropped uint64 // times that all that was taken was void
	Skipped uint64 // blocks that are not kept: see stored
}

func newInstance(f *Fleet, number uint16, config InstanceConfig, log *slog.Logger) *Instance {
	return &Instance{
		Name: config.Name, Source: config.Source, fleet: f, number: number,
		log:   log.With("instance", config.Name),
		state: emptyState(),
		why:   "not connected yet",
	}
}

func emptyState() state {
	return state{Naming: HashPending, Refcounts: make(map[place]uint32)}
}

// Position is how far the events were taken.
func (i *Instance) Position() feed.Position {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.state.Position
}

// Take applies a batch.
func (i *Instance) Take(number uint64, batch []byte) {
	i.fleet.quiet.RLock()
	defer i.fleet.quiet.RUnlock()
	i.mu.Lock()
	defer i.mu.Unlock()
	if number == 0 {
		i.state.Complete = true
	}
	i.counts.Batches++
	if err := i.decoder.Decode(batch, i.apply); err != nil {
		i.drop(fmt.Sprintf("batch %d: %v", number, err))
	}
	i.state.Position = feed.Position{Next: number + 1, Last: feed.Digest(batch)}
}

// Drop forgets all.
func (i *Instance) Drop(why string) {
	i.fleet.quiet.RLock()
	defer i.fleet.quiet.RUnlock()
	i.mu.Lock()
	defer i.mu.Unlock()
	i.drop(why)
}

func (i *Instance) drop(why string) {
	i.log.Warn("its blocks are forgotten", "why", why)
	i.counts.Dropped++
	i.why = why
	i.answers.Store(nil)
	i.forget()
	i.state = emptyState()
}

// forget takes its blocks from the index.
func (i *Instance) forget() {
	i.fleet.index.ClearFunc(func(h holder) bool { return h.instance == i.number })
	clear(i.state.Refcounts)
	i.state.Held = [maxMedia]int{}
}

// Untouched says that there was no event yet.
func (i *Instance) Untouched() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.state.Complete = true
}

// Missed counts batches that did not come by themselves.
func (i *Instance) Missed(batches uint64) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.counts.Gaps++
	i.counts.Missed += batches
}

// Connected says that the state is that of the publisher.
func (i *Instance) Connected() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.connected, i.why = true, ""
	i.answer()
}

// Disconnected says that the state may be that of an instance that is gone.
func (i *Instance) Disconnected(why error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.connected, i.why = false, why.Error()
	i.answers.Store(nil)
}

// answer lets lookups find the instance, if there is an answer to give.
func (i *Instance) answer() {
	if i.connected && i.state.HashScheme.BlockTokens > 0 {
		scheme := i.state.HashScheme
		i.answers.Store(&scheme)
	}
}

func (i *Instance) apply(e *events.Event) error {
	i.counts.Events++
	switch e.Kind {
	case events.Stored:
		i.stored(e)
	case events.Removed:
		i.removed(e)
	case events.Cleared:
		// It names no medium, and the pools of lower ones are reset with it or alone.
		i.forget()
		i.state.Complete = true
	}
	return nil
}

// stored keeps blocks, unless they are of another size than the first of the instance, or
// of a further group of layers, or have hashes that no prompt can give.
func (i *Instance) stored(e *events.Event) {
	if i.state.Naming == HashPending {
		i.detectScheme(e)
	}
	medium, ok := i.medium(e)
	size := i.state.HashScheme.BlockTokens
	sized := e.BlockTokens == 0 || size == 0 || e.BlockTokens == size
	if !ok || !sized || e.Group != 0 || i.state.Naming == HashUnrecognized {
		i.counts.Skipped += uint64(len(e.Names))
		return
	}
	if medium > 0 {
		i.tiered.Store(true)
	}
	if len(e.LoRA) > 0 {
		i.fleet.adapters.add(string(e.LoRA))
	}
	at := holder{i.number, medium}
	i.fresh = i.fresh[:0]
	for _, name := range e.Names {
		if i.fleet.index.Holds(name, at) {
			i.state.Refcounts[place{name, medium}]++
		} else {
			i.fresh = append(i.fresh, name)
		}
	}
	i.fleet.index.Add(i.fresh, at)
	i.state.Held[medium] += len(i.fresh)
	if len(i.state.Refcounts) > i.fleet.maxBlocks {
		i.drop("more further blocks of the same hashes than -max-blocks")
	}
}

func (i *Instance) removed(e *events.Event) {
	medium, ok := i.medium(e)
	if !ok || e.Group != 0 {
		return
	}
	at := holder{i.number, medium}
	for _, name := range e.Names {
		here := place{name, medium}
		if more := i.state.Refcounts[here]; more > 1 {
			i.state.Refcounts[here]--
		} else if more == 1 {
			delete(i.state.Refcounts, here)
		} else if i.fleet.index.Holds(name, at) {
			i.fleet.index.Evict(name, at)
			i.state.Held[medium]--
		}
	}
}

// medium returns the number of an event's medium. vLLM writes them in capitals, and
// connectors as they like.
func (i *Instance) medium(e *events.Event) (uint8, bool) {
	if name := string(e.Medium); name == "" || name == events.GPU {
		return 0, true
	}
	n := i.fleet.media.add(strings.ToUpper(string(e.Medium)))
	return uint8(n), n >= 0
}

// detectScheme finds out how the instance names blocks: from the first block of a prompt, whose
// name depends on nothing but the seed and what is published with it. With an adapter, a
// name that is not recognised says nothing: it may depend on the adapter's path.
func (i *Instance) detectScheme(e *events.Event) {
	size := e.BlockTokens
	if e.HasParent || e.Lookahead || e.Group != 0 || len(e.Names) == 0 ||
		size < 1 || size > blockhash.MaxBlockTokens || e.TokenIDs.Len() < size {
		return
	}
	ids, err := e.TokenIDs.Append(i.ids[:0], size)
	if i.ids = ids; err != nil {
		return
	}
	keys, err := e.FirstKeys()
	if err != nil {
		return
	}
	scheme, ok := i.fleet.schemeOf(e.Names[0], ids, keys)
	if !ok && len(e.LoRA) > 0 {
		return
	}
	if !ok {
		i.state.Naming = HashUnrecognized
		i.log.Warn("it names its blocks with a seed that is not known here: nothing of it can be " +
			"found. Start it with PYTHONHASHSEED set, and kvindexd with the same -hash-seed")
		i.forget()
		return
	}
	i.state.Naming, i.state.HashScheme = HashStatus(scheme.Algorithm), scheme
	i.fleet.schemes.add(scheme)
	i.answer()
}

// A Status is what there is to say of an instance.
type Status struct {
	Name        string         `json:"name"`
	Connected   bool           `json:"connected"`
	Complete    bool           `json:"complete"`
	Naming      HashStatus     `json:"naming"`
	BlockTokens int            `json:"block_tokens"`
	Blocks      map[string]int `json:"blocks"`
	NextBatch   uint64         `json:"next_batch"`
	Batches     uint64         `json:"batches"`
	Events      uint64         `json:"events"`
	Gaps        uint64         `json:"gaps"`
	Missed      uint64         `json:"missed_batches"`
	Dropped     uint64         `json:"dropped"`
	Skipped     uint64         `json:"skipped_blocks"`
	Why         string         `json:"why,omitempty"`
}

// Status says how it is with the instance. Complete: all its events since its start, or
// since its cache was last empty, have been taken. Blocks: by medium.
func (i *Instance) Status() Status {
	i.mu.Lock()
	defer i.mu.Unlock()
	blocks := make(map[string]int)
	for medium, name := range i.fleet.media.all() {
		blocks[name] = i.state.Held[medium]
	}
	return Status{
		Name:        i.Name,
		Connected:   i.connected,
		Complete:    i.state.Complete,
		Naming:      i.state.Naming,
		BlockTokens: i.state.HashScheme.BlockTokens,
		Blocks:      blocks,
		NextBatch:   i.state.Position.Next,
		Batches:     i.counts.Batches,
		Events:      i.counts.Events,
		Gaps:        i.counts.Gaps,
		Missed:      i.counts.Missed,
		Dropped:     i.counts.Dropped,
		Skipped:     i.counts.Skipped,
		Why:         i.why,
	}
}
