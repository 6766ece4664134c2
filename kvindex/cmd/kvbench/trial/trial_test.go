// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"sync"
	"sync/atomic"
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

func burstConfig() BurstConfig {
	return BurstConfig{
		Capacity:        10_000,
		Readers:         8,
		Blocks:          263,
		Bursts:          5,
		Period:          20 * time.Millisecond,
		EventsPerSecond: 400,
		Deadline:        time.Now().Add(time.Minute),
	}
}

func newIndex(t *testing.T, name string, capacity int) design.Index {
	t.Helper()
	index, err := design.New(name, capacity, podsPerChain)
	if err != nil {
		t.Fatal(err)
	}
	return index
}

func TestEveryReaderOfEveryBurstCountsAndFindsTheWholePrefix(t *testing.T) {
	for _, name := range []string{"upstream", "merged", "kvindex"} {
		t.Run(name, func(t *testing.T) {
			config := burstConfig()
			got, err := Burst(newIndex(t, name, config.Capacity), config)
			if err != nil {
				t.Fatal(err)
			}
			want := int64(config.Bursts * config.Readers)
			if got.Latency.N != want || got.Service.N != want || got.Unfinished != 0 || got.Stopped {
				t.Errorf("%d latencies, %d lookups, %d unfinished, want %d", got.Latency.N, got.Service.N, got.Unfinished, want)
			}
			if got.CoverageMin != 1 || got.CoverageMean != 1 {
				t.Errorf("coverage %v, at least %v", got.CoverageMean, got.CoverageMin)
			}
			if got.Lateness.N == 0 || got.Len != config.Capacity {
				t.Errorf("%d events, %d keys: eviction was not live", got.Lateness.N, got.Len)
			}
			if got.Latency.P50Us < got.Service.P50Us {
				t.Errorf("latency %v is less than that of the lookup alone %v", got.Latency, got.Service)
			}
		})
	}
}

func TestEveryPodHoldsTwoOfTheHotPrefixes(t *testing.T) {
	hot, err := newHotSet(16, 1000)
	if err != nil {
		t.Fatal(err)
	}
	for pod := range writerPods {
		if held := len(hot.heldBy(pod)); held != podsPerChain*hotPrefixes/writerPods {
			t.Errorf("pod %d holds %d", pod, held)
		}
	}
}

// slow is an index that takes its time for lookups and events, one after the other, from
// the first event on: not while it is filled and its readers are warmed.
type slow struct {
	design.Index
	mu          sync.Mutex
	lookup, add time.Duration
	live        atomic.Bool
}

func (s *slow) wait(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	time.Sleep(d)
}

func (s *slow) Add(chain []uint64, pod string) {
	if len(chain) == eventKeys {
		s.live.Store(true)
		s.wait(s.add)
	}
	s.Index.Add(chain, pod)
}

func (s *slow) NewReader() design.Reader { return &slowReader{s.Index.NewReader(), s} }

type slowReader struct {
	design.Reader
	index *slow
}

func (r *slowReader) Lookup(chain []uint64) {
	if r.index.live.Load() {
		r.index.wait(r.index.lookup)
	}
	r.Reader.Lookup(chain)
}

// TestABurstDoesNotWaitForTheLastOne: 10 lookups of 50 ms, one after the other, that were
// to begin within 100 ms. A load that waited for the index would see 100 ms at most.
func TestABurstDoesNotWaitForTheLastOne(t *testing.T) {
	config := burstConfig()
	config.Readers = 2
	index := &slow{Index: newIndex(t, "kvindex", config.Capacity), lookup: 50 * time.Millisecond}
	got, err := Burst(index, config)
	if err != nil {
		t.Fatal(err)
	}
	if want := float64(10*50-5*20) * 1e3; got.Latency.MaxUs < want {
		t.Errorf("the last lookup took %v us from its intended release, want at least %v", got.Latency.MaxUs, want)
	}
	if got.CoverageMin != 1 || got.Latency.N != 10 {
		t.Errorf("%d lookups, coverage %v", got.Latency.N, got.CoverageMin)
	}
}

func TestAWriterThatIsLateSkipsNothing(t *testing.T) {
	config := burstConfig()
	config.Bursts = 20 // 400 ms, in which at most 40 of the 160 events can be sent
	index := &slow{Index: newIndex(t, "kvindex", config.Capacity), add: 10 * time.Millisecond}
	got, err := Burst(index, config)
	if err != nil {
		t.Fatal(err)
	}
	if got.Lateness.MaxUs < 50e3 {
		t.Errorf("no event was later than %v us", got.Lateness.MaxUs)
	}
	if got.EventsPerSecond > 0.5*got.StatedEventsPerSecond {
		t.Errorf("%v events a second", got.EventsPerSecond)
	}
}

func TestATrialThatTakesTooLongSaysWhatItHad(t *testing.T) {
	config := burstConfig()
	config.Deadline = time.Now().Add(time.Second)
	index := &slow{Index: newIndex(t, "kvindex", config.Capacity), lookup: 60 * time.Millisecond}
	got, err := Burst(index, config) // 40 lookups would take 2.4 s
	if err != nil {
		t.Fatal(err)
	}
	started := int64(config.Bursts * config.Readers)
	if !got.Stopped || got.Unfinished == 0 || got.Latency.N+got.Unfinished != started {
		t.Errorf("stopped: %v, %d lookups, %d unfinished of %d", got.Stopped, got.Latency.N, got.Unfinished, started)
	}
}
