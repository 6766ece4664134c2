// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"log/slog"
	"slices"
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

	// answers is what lookups need while there is an answer to give: it is known how
	// blocks are named, and the state is that of a publisher that is connected.
	answers atomic.Pointer[layout]
	// tiered is set once it held a block elsewhere than in the GPU.
	tiered atomic.Bool
	// evicted is set once one of its blocks was forgotten for lack of room.
	evicted atomic.Bool
	// media are where it keeps blocks, the GPU first; adapters are those with a block.
	media    set[string]
	adapters set[string]

	mu        sync.Mutex
	decoder   events.Decoder
	ids       []uint32
	fresh     []uint64
	state     state
	connected bool
	why       string // it is not connected, or was dropped last
	rank      int64  // of the data-parallel engine that publishes; -1 if none is named
	mixed     bool   // several of them publish
	counts    Counts
}

// state is what a snapshot keeps of an instance, beside its blocks.
type state struct {
	Position   feed.Position
	Complete   bool
	Naming     HashStatus
	HashScheme names.HashScheme
	Attempts   int // to find the scheme
	Groups     []group
	// Refcounts counts the further blocks of the same hash in the same place: a hash is
	// gone with the last of them.
	Refcounts map[place]uint32
}

// A place is a block in a medium, for a KV cache group.
type place struct {
	Name   uint64
	Medium uint8
	Group  uint8
}

// A group is what is known of a KV cache group: layers that share their blocks.
type group struct {
	Kind        string // as events have it, empty to vLLM 0.18
	Window      int
	BlockTokens int  // of a whole block; 0 if there was none yet
	Partial     bool // parts of its blocks can be found, too
}

// Counts are what has happened since the start.
type Counts struct {
	Batches uint64 // taken
	Events  uint64
	Gaps    uint64 // times that batches did not come by themselves
	Missed  uint64 // such batches
	Dropped uint64 // times that all that was taken was void
	Skipped uint64 // blocks that are not kept: see stored
	Unknown uint64 // events of unknown kinds
}

func newInstance(f *Fleet, number uint16, config InstanceConfig, log *slog.Logger) *Instance {
	i := &Instance{
		Name: config.Name, Source: config.Source, fleet: f, number: number,
		log:   log.With("instance", config.Name),
		state: emptyState(),
		why:   "not connected yet",
		rank:  -1,
	}
	i.media.most, i.adapters.most = maxMedia, maxAdapters
	i.media.add(events.GPU)
	return i
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
	} else {
		i.checkRank(i.decoder.Rank)
	}
	i.state.Position = feed.Position{Next: number + 1, Last: feed.Digest(batch)}
}

// checkRank notes if several engines publish on one stream: their batches have numbers of
// their own, and blocks that the others do not have.
func (i *Instance) checkRank(rank int64) {
	if i.rank < 0 {
		i.rank = rank
	}
	if rank < 0 || rank == i.rank || i.mixed {
		return
	}
	i.mixed = true
	i.drop(fmt.Sprintf("data-parallel ranks %d and %d publish on one stream: "+
		"give each an endpoint and an instance of its own", i.rank, rank))
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
	i.adapters.has.Store(nil)
	i.media.has.Store(&[]string{events.GPU})
	i.evicted.Store(false)
	clear(i.state.Refcounts)
}

// complete reports whether it holds just what it is said to hold.
func (i *Instance) complete() bool { return i.state.Complete && !i.evicted.Load() && !i.mixed }

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
	i.connected = true
	if !i.mixed {
		i.why = ""
	}
	i.answer()
}

// Disconnected says that the state may be that of an instance that is gone.
func (i *Instance) Disconnected(why error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.connected, i.why = false, why.Error()
	i.rank, i.mixed = -1, false
	i.answers.Store(nil)
}

// answer lets lookups find the instance, if there is an answer to give.
func (i *Instance) answer() {
	if i.connected && !i.mixed && i.state.HashScheme.BlockTokens > 0 {
		i.answers.Store(newLayout(i.state.HashScheme, i.state.Groups))
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
		if i.state.Naming == HashUnrecognized { // the next prompts tell anew
			i.state.Naming, i.state.Attempts = HashPending, 0
		}
	default:
		i.counts.Unknown++
		i.state.Complete = false
	}
	return nil
}

// stored keeps blocks, unless no prompt can be found in them: what they hold has no name,
// or their group or their size has no part in what vLLM finds.
func (i *Instance) stored(e *events.Event) {
	if i.state.HashScheme.BlockTokens == 0 {
		i.detectScheme(e)
	}
	medium, ok := i.medium(e)
	if !ok || i.state.Naming == HashUnrecognized || !i.counted(e, medium) {
		i.counts.Skipped += uint64(len(e.Names))
		return
	}
	if medium > 0 {
		i.tiered.Store(true)
	}
	if 0 < len(e.LoRA) && len(e.LoRA) <= maxAdapterBytes {
		i.adapters.add(string(e.LoRA))
	}
	at := holder{i.number, medium, uint8(e.Group)}
	i.fresh = i.fresh[:0]
	var added map[uint64]bool // by this event, if it has many names
	if len(e.Names) > maxScanned {
		added = make(map[uint64]bool, len(e.Names))
	}
	for _, name := range e.Names {
		if added[name] || added == nil && slices.Contains(i.fresh, name) || i.fleet.index.Holds(name, at) {
			i.state.Refcounts[place{name, medium, at.group}]++
			continue
		}
		i.fresh = append(i.fresh, name)
		if added != nil {
			added[name] = true
		}
	}
	i.fleet.index.Add(i.fresh, at)
	if len(i.state.Refcounts) > i.fleet.maxBlocks {
		i.drop("more further blocks of the same hashes than -max-blocks")
	}
}

func (i *Instance) removed(e *events.Event) {
	medium, ok := i.medium(e)
	if !ok || e.Group < 0 || e.Group >= maxGroups {
		return
	}
	at := holder{i.number, medium, uint8(e.Group)}
	for _, name := range e.Names {
		here := place{name, medium, at.group}
		if more := i.state.Refcounts[here]; more > 1 {
			i.state.Refcounts[here]--
		} else if more == 1 {
			delete(i.state.Refcounts, here)
		} else {
			i.fleet.index.Evict(name, at)
		}
	}
}

// counted learns of a group from blocks that are stored for it, and reports whether they
// have a part in what is found. In lower media those do that are as large as the GPU's.
func (i *Instance) counted(e *events.Event, medium uint8) bool {
	if e.Group < 0 || e.Group >= maxGroups {
		return false
	}
	for len(i.state.Groups) <= e.Group {
		i.state.Groups = append(i.state.Groups, group{})
	}
	g := &i.state.Groups[e.Group]
	size, unit := e.BlockTokens, i.state.HashScheme.BlockTokens
	if size == 0 {
		size = max(g.BlockTokens, unit)
	}
	if medium > 0 {
		return size == g.BlockTokens || g.BlockTokens == 0 && size == unit
	}
	learned := *g
	if len(e.Spec) > 0 && string(e.Spec) != g.Kind {
		learned.Kind = string(e.Spec[:min(len(e.Spec), maxKindBytes)])
	}
	learned.Window = max(e.Window, g.Window)
	if learned.attention() == unknownAttention || e.Group > 0 && learned.Kind == "" {
		*g = learned
		return false
	}
	if size == 0 {
		return true // nothing to learn
	}
	if size < 0 || size > maxGroupTokens || unit > 0 && size%unit > 0 {
		return false
	}
	if g.BlockTokens > 0 && size != g.BlockTokens {
		if !i.hybrid() {
			return false // only hybrid models have parts of blocks
		}
		learned.Partial = true
	}
	learned.BlockTokens = max(size, g.BlockTokens)
	if *g != learned {
		*g = learned
		i.answer()
	}
	return true
}

// hybrid reports whether the instance has several groups.
func (i *Instance) hybrid() bool {
	groups := 0
	for _, g := range i.state.Groups {
		groups += min(g.BlockTokens, 1)
	}
	return groups > 1
}

// medium returns the number of an event's medium. vLLM writes them in capitals, and
// connectors as they like.
func (i *Instance) medium(e *events.Event) (uint8, bool) {
	if name := string(e.Medium); name == "" || name == events.GPU {
		return 0, true
	}
	if len(e.Medium) > maxKindBytes {
		return 0, false
	}
	n := i.media.add(strings.ToUpper(string(e.Medium)))
	if n < 0 && i.why == "" {
		i.why = fmt.Sprintf("blocks in more than %d media: those in further ones are not kept", maxMedia)
	}
	return uint8(n), n >= 0
}

const (
	// maxAttempts bounds what it costs that a scheme is not found, and maxOddAttempts how
	// many of them go to blocks with an adapter or extra keys.
	maxAttempts    = 64
	maxOddAttempts = maxAttempts / 2
	// maxNamingTokens bounds how far it is looked for which block of a prompt a name is of.
	maxNamingTokens = 1 << 13
	maxGroupTokens  = 1 << 20
	maxKindBytes    = 40 // of a kind or a medium
	maxAdapterBytes = 1 << 10
	// maxScanned names are looked through faster than a map is filled.
	maxScanned = 32
)

// detectScheme finds out how the instance names blocks: from the first event of a prompt,
// whose names depend on nothing but the seed and what is published with it. Only a first
// block without an adapter or extra keys tells that a seed is not known, and only as long
// as no other one is recognised. Groups that do not look at the whole prompt may leave out
// its first blocks: then it is not said which block a name is of.
func (i *Instance) detectScheme(e *events.Event) {
	size := e.BlockTokens
	if e.HasParent || e.Lookahead || len(e.Names) == 0 || i.state.Attempts == maxAttempts ||
		size < 1 || size > blockhash.MaxBlockTokens || e.TokenIDs.Len() < size {
		return
	}
	keys, err := e.FirstKeys()
	if err != nil {
		return
	}
	plain := keys == nil && len(e.LoRA) == 0
	if !plain && i.state.Attempts >= maxOddAttempts {
		return
	}
	first := e.TokenIDs.Len() == len(e.Names)*size
	read := size
	if plain && !first {
		read = max(size, min(e.TokenIDs.Len(), maxNamingTokens))
	}
	ids, err := e.TokenIDs.Append(i.ids[:0], read)
	if i.ids = ids; err != nil {
		return
	}
	i.state.Attempts++
	scheme, ok := i.fleet.schemeOf(e.Names[0], ids, size, keys)
	switch {
	case ok:
		i.recognize(scheme, e.Group)
	case plain && first && i.state.Naming == HashPending:
		i.state.Naming, i.state.Complete = HashUnrecognized, false
		i.log.Warn("it names its blocks with a seed that is not known here: nothing of it can be " +
			"found. Start it with PYTHONHASHSEED set, and kvindexd with the same -hash-seed")
		i.forget()
	}
}

// recognize takes over a scheme that a block of a group has told. What was learned of
// groups before may be of blocks that it cannot have.
func (i *Instance) recognize(scheme names.HashScheme, number int) {
	i.state.Naming, i.state.HashScheme = HashStatus(scheme.Algorithm), scheme
	for n := range i.state.Groups {
		if g := &i.state.Groups[n]; n == number || g.BlockTokens%scheme.BlockTokens > 0 {
			g.BlockTokens, g.Partial = 0, false
		}
	}
}

// A Status is what there is to say of an instance.
type Status struct {
	Name        string         `json:"name"`
	Connected   bool           `json:"connected"`
	Complete    bool           `json:"complete"`
	Naming      HashStatus     `json:"naming"`
	BlockTokens int            `json:"block_tokens"`
	Blocks      map[string]int `json:"blocks"`
	Groups      []GroupStatus  `json:"groups,omitempty"` // of hybrid models
	NextBatch   uint64         `json:"next_batch"`
	Batches     uint64         `json:"batches"`
	Events      uint64         `json:"events"`
	Gaps        uint64         `json:"gaps"`
	Missed      uint64         `json:"missed_batches"`
	Dropped     uint64         `json:"dropped"`
	Skipped     uint64         `json:"skipped_blocks"`
	Unknown     uint64         `json:"unknown_events"`
	Why         string         `json:"why,omitempty"`
}

// A GroupStatus is what there is to say of a KV cache group.
type GroupStatus struct {
	Kind        string `json:"kind"`
	Window      int    `json:"window,omitempty"`
	BlockTokens int    `json:"block_tokens"` // 0: it has no part in what is found
	Blocks      int    `json:"blocks"`       // in the GPU
}

// Status says how it is with the instance. Complete: all its events since its start, or
// since its cache was last empty, have been taken and understood, and none of its blocks was forgotten for
// lack of room. Blocks: by medium, of the first group
// whose layers look at the whole prompt, in blocks of BlockTokens.
func (i *Instance) Status() Status {
	i.mu.Lock()
	defer i.mu.Unlock()
	main, per := i.mainGroup()
	blocks := make(map[string]int)
	for medium, name := range i.media.all() {
		blocks[name] = per * i.fleet.index.Count(holder{i.number, uint8(medium), main})
	}
	return Status{
		Groups:      i.groupStatuses(),
		Name:        i.Name,
		Connected:   i.connected,
		Complete:    i.complete(),
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
		Unknown:     i.counts.Unknown,
		Why:         i.why,
	}
}

// mainGroup returns the first group that looks at the whole prompt, or else the first, and
// how many of the blocks that are hashed one of its own has.
func (i *Instance) mainGroup() (number uint8, per int) {
	n := max(0, slices.IndexFunc(i.state.Groups, func(g group) bool {
		return g.BlockTokens > 0 && g.attention() == fullAttention
	}))
	if unit := i.state.HashScheme.BlockTokens; unit > 0 && n < len(i.state.Groups) {
		return uint8(n), max(1, i.state.Groups[n].BlockTokens/unit)
	}
	return uint8(n), 1
}

// groupStatuses returns nothing for a model with one group.
func (i *Instance) groupStatuses() []GroupStatus {
	if len(i.state.Groups) < 2 {
		return nil
	}
	var statuses []GroupStatus
	for n, g := range i.state.Groups {
		blocks := i.fleet.index.Count(holder{i.number, 0, uint8(n)})
		statuses = append(statuses, GroupStatus{g.Kind, g.Window, g.BlockTokens, blocks})
	}
	return statuses
}
