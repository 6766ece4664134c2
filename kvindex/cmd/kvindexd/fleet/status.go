// SPDX-License-Identifier: Apache-2.0

package fleet

// A Status is what there is to say of an instance.
type Status struct {
	Name        string         `json:"name"`
	Connected   bool           `json:"connected"`
	Complete    bool           `json:"complete"`
	Naming      Naming         `json:"naming"`
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
		BlockTokens: i.state.Way.BlockTokens,
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
