// SPDX-License-Identifier: Apache-2.0

package design

import (
	"slices"

	"github.com/maypok86/otter/v2"
)

// otterIndex is a general concurrent cache as it comes (otter v2, W-TinyLFU). Its reads
// take no lock and its bookkeeping is done in the background, so it may hold more than
// its capacity until that is done. Pod sets are copied when they change.
type otterIndex struct {
	names      *podNames
	keys       *otter.Cache[uint64, []podID]
	podsPerKey int
}

func newOtter(capacity, podsPerKey int) (Index, error) {
	keys, err := otter.New(&otter.Options[uint64, []podID]{MaximumSize: capacity})
	return &otterIndex{newPodNames(), keys, podsPerKey}, err
}

// Add admits the tail first: of keys that are read alike, the tail then goes first.
func (x *otterIndex) Add(chain []uint64, pod string) {
	id := x.names.id(pod)
	for _, key := range slices.Backward(chain) {
		// Most of what is added is there already: that is a read, not a write.
		if set, ok := x.keys.GetIfPresent(key); ok && slices.Contains(set, id) {
			continue
		}
		x.keys.Compute(key, func(set []podID, _ bool) ([]podID, otter.ComputeOp) {
			return joined(set, id, x.podsPerKey), otter.WriteOp
		})
	}
}

func (x *otterIndex) Evict(key uint64, pod string) {
	id := x.names.id(pod)
	x.keys.ComputeIfPresent(key, func(set []podID) ([]podID, otter.ComputeOp) {
		set = parted(set, id)
		if len(set) == 0 {
			return nil, otter.InvalidateOp
		}
		return set, otter.WriteOp
	})
}

// Len waits for the bookkeeping that is due, so that it is within the capacity when
// nothing writes meanwhile.
func (x *otterIndex) Len() int {
	x.keys.CleanUp()
	return x.keys.EstimatedSize()
}

func (x *otterIndex) NewReader() Reader { return &otterReader{x, walk{names: x.names}} }

type otterReader struct {
	index *otterIndex
	walk
}

func (r *otterReader) Lookup(chain []uint64) {
	r.begin()
	for _, key := range chain {
		pods, ok := r.index.keys.GetIfPresent(key)
		if !ok || !r.next(pods) {
			break
		}
	}
	r.end()
}
