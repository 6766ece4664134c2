// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"reflect"
	"slices"
	"testing"
)

func TestEqualSeedsGiveEqualTraces(t *testing.T) {
	one, same, other := Synthetic(1, 200), Synthetic(1, 200), Synthetic(2, 200)
	if !reflect.DeepEqual(one, same) {
		t.Error("the same seed gave another trace")
	}
	if reflect.DeepEqual(one, other) {
		t.Error("another seed gave the same trace")
	}
}

func TestATurnContinuesTheTurnBefore(t *testing.T) {
	last := map[int][]uint64{}
	owner := map[uint64]int{}
	turns := 0
	for i, r := range Synthetic(1, 2_000) {
		before := last[r.Session]
		if len(before) > 0 {
			turns++
			if !slices.Equal(before, r.Chain[:len(before)]) || len(r.Chain) == len(before) {
				t.Fatalf("request %d does not continue session %d", i, r.Session)
			}
		}
		for _, key := range r.Chain[len(before):] {
			if of, ok := owner[key]; ok {
				t.Fatalf("request %d: sessions %d and %d share a block", i, of, r.Session)
			}
			owner[key] = r.Session
		}
		last[r.Session] = r.Chain
	}
	if turns < 1_000 {
		t.Errorf("only %d of 2,000 requests continue a session", turns)
	}
}
