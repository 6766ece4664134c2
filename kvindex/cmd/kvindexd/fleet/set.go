// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"sync"
	"sync/atomic"
)

// A set is a few things in the order in which they came, at most so many. It is read
// without a lock.
type set[T comparable] struct {
	most int
	mu   sync.Mutex
	has  atomic.Pointer[[]T]
}

// all returns what there is. It must not be changed.
func (s *set[T]) all() []T {
	if has := s.has.Load(); has != nil {
		return *has
	}
	return nil
}

// add returns the place of a thing that is there from now on; -1 if there is no room.
func (s *set[T]) add(one T) int {
	if n := slices.Index(s.all(), one); n >= 0 {
		return n
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := slices.Index(s.all(), one)
	if n < 0 && len(s.all()) < s.most {
		n = len(s.all())
		more := append(slices.Clone(s.all()), one)
		s.has.Store(&more)
	}
	return n
}
