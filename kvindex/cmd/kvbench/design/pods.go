// SPDX-License-Identifier: Apache-2.0

package design

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
)

// A podID is a pod's number: four bytes to store and one comparison, where a name
// takes sixteen and a call.
type podID uint32

// podNames numbers pods, for designs that have no such table of their own. A number is
// never let go of, as the pods of a trial are few.
type podNames struct {
	mu    sync.Mutex                       // for new pods
	ids   atomic.Pointer[map[string]podID] // copied when a pod is new
	names atomic.Pointer[[]string]         // by id
}

func newPodNames() *podNames {
	n := new(podNames)
	n.ids.Store(&map[string]podID{})
	n.names.Store(&[]string{})
	return n
}

// id returns the number of a pod, which may be new.
func (n *podNames) id(pod string) podID {
	if id, ok := (*n.ids.Load())[pod]; ok {
		return id
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if id, ok := (*n.ids.Load())[pod]; ok {
		return id
	}
	names := append(slices.Clone(*n.names.Load()), pod)
	ids := maps.Clone(*n.ids.Load())
	id := podID(len(ids))
	ids[pod] = id
	n.names.Store(&names) // first: whoever knows the number may ask for the name
	n.ids.Store(&ids)
	return id
}

// touched returns a set, the pod added last at its end, after one more is added. A pod
// beyond limit displaces the one added longest ago, as upstream has it. The set is
// changed in place: the caller must have excluded readers.
func touched(set []podID, id podID, limit int) []podID {
	i := slices.Index(set, id)
	if i < 0 && len(set) < limit {
		return append(set, id)
	}
	i = max(i, 0)
	copy(set[i:], set[i+1:])
	set[len(set)-1] = id
	return set
}

// joined returns a copy of a set with one more pod; or the set itself if it has the pod
// already, so that what is added again costs no copy. A pod beyond limit displaces the
// one that joined first.
func joined(set []podID, id podID, limit int) []podID {
	if slices.Contains(set, id) {
		return set
	}
	if len(set) == limit {
		set = set[1:]
	}
	return append(slices.Clip(set), id)
}

// parted returns a copy of a set without a pod.
func parted(set []podID, id podID) []podID {
	return slices.DeleteFunc(slices.Clone(set), func(held podID) bool { return held == id })
}
