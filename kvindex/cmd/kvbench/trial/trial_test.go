// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"testing"
	"time"

	"kvtax/kvindex/cmd/kvbench/design"
)

func TestAWalkFindsWholeChainsAndMeasuresItsFloor(t *testing.T) {
	for _, name := range []string{"merged", "kvindex"} {
		got, err := Walk(newIndex(t, name, 20_000), WalkConfig{Keys: 20_000, Blocks: 64})
		if err != nil {
			t.Fatal(err)
		}
		if got.Prefix != got.Blocks {
			t.Errorf("%s: %d of %d blocks", name, got.Prefix, got.Blocks)
		}
		if got.FloorNs <= 0 || got.StampedToFloor <= 0 || got.HotNs <= 0 {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestMemoryCountsWhatTheIndexHolds(t *testing.T) {
	const keys, pods = 2_000, 10
	bytes := map[string]float64{}
	for _, sets := range PodSets {
		open := func() (design.Index, error) { return design.New("kvindex", keys, pods) }
		got, err := Memory(open, MemoryConfig{Keys: keys, PodsPerKey: pods, Sets: sets})
		if err != nil {
			t.Fatal(err)
		}
		if got.Len != keys {
			t.Errorf("%s: %d keys", sets, got.Len)
		}
		bytes[sets] = got.BytesPerKey
	}
	// A key and what is said of it take 16 bytes, a set of 10 names 160.
	if bytes[IdenticalSets] < 16 || bytes[DifferentSets] < bytes[IdenticalSets]+100 {
		t.Errorf("%v", bytes)
	}
}

func TestWritesEvictWhatIsHeld(t *testing.T) {
	got, err := Writes(newIndex(t, "kvindex", 2_000), WritesConfig{Capacity: 2_000, Duration: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if got.Evicted != 1 || got.EvictedByAll != 1 {
		t.Errorf("%v and %v of the keys were held", got.Evicted, got.EvictedByAll)
	}
	if got.AddKeysPerSecond <= 0 || got.AddAllKeysPerSecond <= 0 || got.EvictKeysPerSecond <= 0 {
		t.Errorf("%+v", got)
	}
}

func TestReplayRefusesATraceItDoesNotKnow(t *testing.T) {
	if _, err := Replay(newIndex(t, "kvindex", 100), "nonesuch", "", 100); err == nil {
		t.Error("no error")
	}
}
