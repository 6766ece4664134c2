// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"

	"kvtax/kvindex"
	"kvtax/kvindex/cmd/kvindexd/blockhash"
	"kvtax/kvindex/cmd/kvindexd/names"
)

// lowerTier is what a block in a lower medium counts in a score, beside 1 in the GPU:
// the weight that llm-d's tiered scorer gives to one in the CPU's memory.
const lowerTier = 0.8

// maxNamers bounds what a Reader keeps for each way to name blocks.
const maxNamers = 64

// A Query is a prompt: its token ids, with what else decides what its blocks hold, or
// else the names of its blocks. Model is what a request names: to an instance that has blocks
// of an adapter with that name, it is that adapter.
type Query struct {
	IDs   []uint32
	Model string
	Extra blockhash.Extra
	Names []uint64
}

// A Holding is what an instance holds of a prompt.
type Holding struct {
	Instance    *Instance
	BlockTokens int // 0 if nothing can be said of the instance
	Blocks      int // that lead the prompt and need not be computed, by what is in the GPU
	Further     int // that follow these, in one lower medium
	Medium      uint8
	layout      *layout
	adapter     bool // the model of the query is one of its adapters
}

// Score is 1 for each leading block, and 0.8 for each further one.
func (h *Holding) Score() float64 { return float64(h.Blocks) + lowerTier*float64(h.Further) }

// MediumName returns the name of the Medium.
func (h *Holding) MediumName() string {
	if media := h.Instance.media.all(); int(h.Medium) < len(media) {
		return media[h.Medium]
	}
	return "" // all its blocks have just been forgotten
}

// A Reader looks prompts up. It keeps buffers, so it is for one goroutine at a time.
type Reader struct {
	fleet    *Fleet
	namers   map[names.HashScheme]*names.Namer
	names    []uint64
	scores   []kvindex.PodScore[holder]
	further  []kvindex.PodScore[holder]
	holdings []Holding
	schemes  []names.HashScheme // of the instances
	// held is what the instances whose layout is not simple hold of a chain, by instance
	// and group.
	held   [][]spans
	simple int  // instances with a simple layout
	other  int  // and with another one
	named  bool // the instances that count now are those whose adapter the model is
	sparse bool // some of those may hold a block without those before it
}

// NewReader returns a Reader of the fleet.
func (f *Fleet) NewReader() *Reader {
	return &Reader{
		fleet:  f,
		namers: make(map[names.HashScheme]*names.Namer),
		held:   make([][]spans, len(f.instances)),
	}
}

// Lookup returns what each instance holds of a prompt, in the order of the fleet. With
// token ids, that is at most what lies before the last one: vLLM computes at least that.
// It is valid until the next call.
func (r *Reader) Lookup(q *Query) []Holding {
	adapters := r.begin(q)
	if len(q.Names) > 0 {
		r.tally(q.Names)
		return r.holdings
	}
	ids := q.IDs[:max(0, len(q.IDs)-1)]
	extra := q.Extra
	if adapters < len(r.holdings) {
		r.tallyIDs(ids, &extra)
	}
	if adapters > 0 {
		extra.LoRA, r.named = q.Model, true
		r.tallyIDs(ids, &extra)
	}
	return r.holdings
}

// tallyIDs adds what is held of a prompt, by all the ways in which instances name blocks.
func (r *Reader) tallyIDs(ids []uint32, extra *blockhash.Extra) {
	for _, scheme := range r.schemes {
		namer := r.namers[scheme]
		if namer == nil {
			if len(r.namers) > maxNamers { // of instances that are gone
				clear(r.namers)
			}
			namer = names.NewNamer(r.fleet.memo, scheme)
			r.namers[scheme] = namer
		}
		for _, style := range extra.Styles() {
			r.names = namer.Append(r.names[:0], ids, extra, style, r.mayGoOn)
			r.tally(r.names)
		}
	}
}

// begin makes a Holding for each instance, and counts those whose adapter the model is.
func (r *Reader) begin(q *Query) (adapters int) {
	r.holdings, r.schemes = r.holdings[:0], r.schemes[:0]
	r.simple, r.other, r.sparse, r.named = 0, 0, false, false
	byIDs := len(q.Names) == 0 && q.Extra.LoRA == ""
	for _, instance := range r.fleet.instances {
		holding := Holding{Instance: instance}
		if byIDs && slices.Contains(instance.adapters.all(), q.Model) {
			holding.adapter = true
			adapters++
		}
		if l := instance.answers.Load(); l != nil {
			holding.BlockTokens, holding.layout = l.scheme.BlockTokens, l
			if !slices.Contains(r.schemes, l.scheme) {
				r.schemes = append(r.schemes, l.scheme)
			}
			if l.simple {
				r.simple++
			} else {
				r.other++
				r.sparse = r.sparse || l.sparse
			}
		}
		r.holdings = append(r.holdings, holding)
	}
	return adapters
}

// mayGoOn says whether anybody may have a block after one of a name.
func (r *Reader) mayGoOn(name uint64) bool {
	if r.sparse {
		return true
	}
	r.scores = r.fleet.index.Score([]uint64{name}, r.scores)
	return len(r.scores) > 0
}

// tally adds what is held of a chain of names. An instance has blocks of one way and one
// style only, so what is found by others does not count twice.
func (r *Reader) tally(chain []uint64) {
	if r.simple > 0 {
		r.tallyLeading(chain)
	}
	if r.other > 0 {
		r.tallyGroups(chain)
	}
	r.tallyFurther(chain)
}

// tallyLeading adds to the instances whose leading blocks are what counts.
func (r *Reader) tallyLeading(chain []uint64) {
	r.scores = r.fleet.index.Score(chain, r.scores)
	for _, score := range r.scores {
		holding := &r.holdings[score.Pod.instance]
		if l := holding.layout; l != nil && holding.adapter == r.named &&
			l.simple && score.Pod.medium == 0 && score.Pod.group == l.leading {
			holding.Blocks = max(holding.Blocks, score.Blocks)
		}
	}
}

// tallyGroups adds to all other instances.
func (r *Reader) tallyGroups(chain []uint64) {
	for stretch := range r.fleet.index.Stretches(chain) {
		for _, at := range stretch.Pods {
			holding := &r.holdings[at.instance]
			if l := holding.layout; l != nil && holding.adapter == r.named && !l.simple && at.medium == 0 {
				r.hold(l, at, stretch.Begin, stretch.End)
			}
		}
	}
	for n := range r.holdings {
		holding := &r.holdings[n]
		if held := r.held[n]; holding.layout != nil && len(held) > 0 {
			holding.Blocks = max(holding.Blocks, holding.layout.reusable(held, len(chain)))
			for group := range held {
				held[group] = held[group][:0]
			}
		}
	}
}

// hold notes that a group of an instance has a part of the chain.
func (r *Reader) hold(l *layout, at holder, begin, end int) {
	for len(r.held[at.instance]) < maxGroups {
		r.held[at.instance] = append(r.held[at.instance], nil)
	}
	if per := l.per[at.group]; per > 0 {
		held := &r.held[at.instance][at.group]
		*held = held.add(begin/per, end/per)
	}
}

// tallyFurther takes over what follows the leading blocks of instances in one of their
// other media, where vLLM's offloading connectors go on.
func (r *Reader) tallyFurther(chain []uint64) {
	scored := -1
	for n := range r.holdings {
		holding := &r.holdings[n]
		l := holding.layout
		if l == nil || holding.adapter != r.named || !holding.Instance.tiered.Load() || holding.Blocks > len(chain) {
			continue
		}
		if holding.Blocks != scored {
			scored = holding.Blocks
			r.further = r.fleet.index.Score(chain[scored:], r.further)
		}
		for _, score := range r.further {
			at := score.Pod
			if int(at.instance) == n && at.medium > 0 && at.group == l.leading && score.Blocks > holding.Further {
				holding.Further, holding.Medium = score.Blocks, at.medium
			}
		}
	}
}

// A layout is what lookups need to know of an instance: how it names blocks, and what its
// layers look at. Groups whose layers look at the whole prompt come first.
type layout struct {
	scheme names.HashScheme
	groups []reach
	// per is how many of the blocks that are hashed a block of each group has, 0 where the
	// group does not count. Where parts of blocks can be found it is 1.
	per     [maxGroups]int
	align   int   // what is found is a multiple of so many blocks
	leading uint8 // the first group
	simple  bool  // there is no other one, and its layers look at the whole prompt
	sparse  bool
}

// A reach is how far the layers of a group look back.
type reach struct {
	group  uint8
	blocks int // of the group, before the first token that is computed; 0 for all of them
	whole  int // of those that are hashed in one of the group, where parts can be found
}

// An attention is how the layers of a group look back.
type attention uint8

const (
	unknownAttention attention = iota
	fullAttention
	slidingWindow
	stateOnly
)

// attention returns that of a kind of vLLM's KVCacheSpecKind. vLLM 0.18 has no kinds, and
// publishes events of models only that have one group, or are run as if they had.
func (g *group) attention() attention {
	switch g.Kind {
	case "", "full_attention", "mla_attention", "sink_full_attention":
		return fullAttention
	case "sliding_window", "sliding_window_mla":
		return slidingWindow
	case "mamba":
		return stateOnly
	}
	return unknownAttention
}

// newLayout returns the layout of an instance with such groups.
func newLayout(scheme names.HashScheme, groups []group) *layout {
	l := &layout{scheme: scheme, align: 1}
	partial := partsAreFound(groups)
	for n, g := range groups {
		if g.BlockTokens == 0 || g.attention() == unknownAttention {
			continue
		}
		r := reach{group: uint8(n), whole: 1}
		whole := g.BlockTokens / scheme.BlockTokens
		l.per[n] = whole
		if partial {
			l.per[n], r.whole = 1, whole
		} else {
			l.align *= whole / gcd(l.align, whole)
		}
		switch g.attention() {
		case slidingWindow:
			r.blocks = max(1, (g.Window-2+g.BlockTokens)/g.BlockTokens)
		case stateOnly:
			r.blocks = 1
		}
		l.groups = append(l.groups, r)
	}
	slices.SortStableFunc(l.groups, func(a, b reach) int { return min(a.blocks, 1) - min(b.blocks, 1) })
	if len(l.groups) > 0 {
		first := l.groups[0]
		l.leading = first.group
		l.sparse = first.blocks > 0 || l.per[first.group] > 1 || first.whole > 1
		l.simple = len(l.groups) == 1 && !l.sparse
	}
	return l
}

// partsAreFound reports whether parts of blocks can be found. vLLM gives Mamba layers the
// blocks of full attention where states are cached, so smaller ones are parts.
func partsAreFound(groups []group) bool {
	full := 0
	for _, g := range groups {
		if g.attention() == fullAttention {
			full = max(full, g.BlockTokens)
		}
	}
	return slices.ContainsFunc(groups, func(g group) bool {
		return g.Partial || g.attention() == stateOnly && 0 < g.BlockTokens && g.BlockTokens < full
	})
}

func gcd(a, b int) int {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}

// reusable returns how many leading blocks of a prompt vLLM would not compute again: the
// most after which each group has what its layers look back at. It is what
// HybridKVCacheCoordinator.find_longest_cache_hit finds.
func (l *layout) reusable(held []spans, blocks int) int {
	if len(l.groups) == 0 {
		return 0
	}
	found := blocks - blocks%l.align
	rest := l.groups
	for len(rest) > 0 && rest[0].blocks == 0 {
		found = l.leadingBlocks(held, rest[0], found)
		rest = rest[1:]
	}
	for before := -1; found != before; {
		before = found
		for _, r := range rest {
			found = l.lookedBackAt(held[r.group], r, found)
		}
	}
	return found
}

// leadingBlocks returns how many of the first so many blocks a group has from the first on.
func (l *layout) leadingBlocks(held []spans, r reach, most int) int {
	has := held[r.group]
	per := l.per[r.group]
	if r.whole > 1 {
		found := 0
		for found+r.whole <= most && has.has(found+r.whole-1) {
			found += r.whole
		}
		for part := min(found+r.whole-1, most); part > found; part-- {
			if has.has(part - 1) {
				return part
			}
		}
		return found
	}
	if len(has) == 0 || has[0].begin > 0 {
		return 0
	}
	found := min(most, has[0].end*per)
	return found - found%l.align
}

// lookedBackAt returns the most of the first so many blocks after which a group has what
// its layers look back at.
func (l *layout) lookedBackAt(has spans, r reach, most int) int {
	per := l.per[r.group]
	for _, s := range slices.Backward(has) {
		end := min(s.end*per, most)
		end -= end % l.align
		if length := end/per - s.begin; length > 0 && (length >= r.blocks || s.begin == 0) {
			return end
		}
	}
	return 0
}

// spans are parts of a chain, in order and apart.
type spans []span

type span struct{ begin, end int }

// add adds a part after all others.
func (s spans) add(begin, end int) spans {
	if last := len(s) - 1; last >= 0 && s[last].end >= begin {
		s[last].end = max(s[last].end, end)
		return s
	}
	if begin >= end {
		return s
	}
	return append(s, span{begin, end})
}

// has reports whether a place is in one of the parts.
func (s spans) has(at int) bool {
	n, _ := slices.BinarySearchFunc(s, at+1, func(s span, end int) int { return s.end - end })
	return n < len(s) && s[n].begin <= at
}
