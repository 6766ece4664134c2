// SPDX-License-Identifier: Apache-2.0

// Package results is what a run of kvbench leaves behind: what each trial measured, and
// on what.
package results

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// A File is one run.
type File struct {
	Provenance Provenance `json:"provenance"`
	// Planned is the number of trials of the whole run; there are fewer in Trials if it
	// was interrupted.
	Planned int     `json:"planned"`
	Trials  []Trial `json:"trials"`
}

// A Trial is one process that measured one thing. One of the pointers is set, unless it
// failed.
type Trial struct {
	Kind       string `json:"kind"`
	Design     string `json:"design"`
	Round      int    `json:"round"`
	GOMAXPROCS int    `json:"gomaxprocs"`
	// Args are the flags that repeat the trial.
	Args []string `json:"args"`
	// LoadAverage is the machine's over the minute before the trial.
	LoadAverage float64 `json:"load_average"`
	// OtherCores is how many cores were busy with anything else during the trial, on
	// average, or -1 if that is not known.
	OtherCores float64 `json:"other_cores"`
	Seconds    float64 `json:"seconds"`
	// Failure says why there is no measurement.
	Failure string `json:"failure,omitempty"`

	Burst  *Burst  `json:"burst,omitempty"`
	Walk   *Walk   `json:"walk,omitempty"`
	Memory *Memory `json:"memory,omitempty"`
	Writes *Writes `json:"writes,omitempty"`
	Replay *Replay `json:"replay,omitempty"`
}

// The kinds of trials.
const (
	KindBurst  = "burst"
	KindWalk   = "walk"
	KindMemory = "memory"
	KindWrites = "writes"
	KindReplay = "replay"
)

// Kinds are all of them, in the order in which reports have them.
var Kinds = []string{KindBurst, KindWalk, KindMemory, KindWrites, KindReplay}

// Result returns where a trial of this kind puts its measurement, or nil if the kind is
// not known.
func (t *Trial) Result() any {
	switch t.Kind {
	case KindBurst:
		t.Burst = new(Burst)
		return t.Burst
	case KindWalk:
		t.Walk = new(Walk)
		return t.Walk
	case KindMemory:
		t.Memory = new(Memory)
		return t.Memory
	case KindWrites:
		t.Writes = new(Writes)
		return t.Writes
	case KindReplay:
		t.Replay = new(Replay)
		return t.Replay
	}
	return nil
}

// Quantiles sum up a distribution, in microseconds.
type Quantiles struct {
	N     int64   `json:"n"`
	P50Us float64 `json:"p50_us"`
	P90Us float64 `json:"p90_us"`
	P99Us float64 `json:"p99_us"`
	MaxUs float64 `json:"max_us"`
}

// Burst is what readers had to wait for while writers wrote.
type Burst struct {
	Readers int `json:"readers"`
	Blocks  int `json:"blocks"`
	// Latency is from the moment a burst was meant to be released to the end of each
	// lookup; Service from the beginning of the lookup to its end.
	Latency Quantiles `json:"latency"`
	Service Quantiles `json:"service"`
	// Release is how late bursts were released: the scheduler's part of the latency.
	Release Quantiles `json:"release"`
	// Bursts were meant to come; Unfinished is how many lookups had not ended when the
	// trial was stopped, as it did not finish in time.
	Bursts     int   `json:"bursts"`
	Unfinished int64 `json:"unfinished"`
	Stopped    bool  `json:"stopped"`

	// StatedEventsPerSecond is what the writers were meant to send.
	StatedEventsPerSecond float64   `json:"stated_events_per_second"`
	EventsPerSecond       float64   `json:"events_per_second"`
	Lateness              Quantiles `json:"lateness"`

	// Coverage is the part of a hot prefix that the best pod was found to hold.
	CoverageMean float64 `json:"coverage_mean"`
	CoverageMin  float64 `json:"coverage_min"`

	Capacity        int     `json:"capacity"`
	Len             int     `json:"len"`
	AllocsPerLookup float64 `json:"allocs_per_lookup"`
	GCCycles        uint32  `json:"gc_cycles"`
	Seconds         float64 `json:"seconds"`
}

// Walk is what a lookup costs one thread when nothing else runs, in nanoseconds a chain.
type Walk struct {
	Keys   int `json:"keys"`
	Blocks int `json:"blocks"`
	// HotNs is of the same chain again and again, the others of all chains in random
	// order: for the first time since they were added, and once more.
	HotNs         float64 `json:"hot_ns"`
	ColdFirstNs   float64 `json:"cold_first_ns"`
	ColdStampedNs float64 `json:"cold_stamped_ns"`
	// FloorNs is of as many independent 16-byte loads from FloorBytes of memory as a
	// chain has blocks. Each ratio is the median over rounds of cold to floor.
	FloorBytes     int     `json:"floor_bytes"`
	FloorNs        float64 `json:"floor_ns"`
	FirstToFloor   float64 `json:"first_to_floor"`
	StampedToFloor float64 `json:"stamped_to_floor"`
	// Prefix is how many leading blocks the last lookup found: all of them.
	Prefix int `json:"prefix"`
}

// Memory is the heap that an index needs.
type Memory struct {
	Keys        int     `json:"keys"`
	PodsPerKey  int     `json:"pods_per_key"`
	Sets        string  `json:"sets"`
	BytesPerKey float64 `json:"bytes_per_key"`
	// Len is how many keys the index said it held.
	Len int `json:"len"`
}

// Writes is how fast an index takes events of 16 keys, by one goroutine and by as many
// as there are cores.
type Writes struct {
	Capacity              int     `json:"capacity"`
	AddKeysPerSecond      float64 `json:"add_keys_per_second"`
	AddAllKeysPerSecond   float64 `json:"add_all_keys_per_second"`
	EvictKeysPerSecond    float64 `json:"evict_keys_per_second"`
	EvictAllKeysPerSecond float64 `json:"evict_all_keys_per_second"`
	// Evicted and EvictedByAll are which parts of the keys the index held until then.
	Evicted      float64 `json:"evicted"`
	EvictedByAll float64 `json:"evicted_by_all"`
}

// Replay is how much of the prompts of a trace an index of some capacity found.
type Replay struct {
	Trace       string  `json:"trace"`
	Capacity    int     `json:"capacity"`
	Requests    int     `json:"requests"`
	Blocks      int     `json:"blocks"`
	UsableRatio float64 `json:"usable_ratio"`
}

// Read returns the run of a file.
func Read(path string) (*File, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	file := new(File)
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(file); err != nil {
		return nil, fmt.Errorf("%s is not a whole results file of this kvbench (%w): make it anew with `kvbench run`", path, err)
	}
	return file, nil
}

// Write replaces the file at once, so that whoever reads it sees a whole run. Each
// trial has a line of its own.
func (f *File) Write(path string) error {
	var text bytes.Buffer
	provenance, err := json.MarshalIndent(f.Provenance, "  ", "  ")
	if err != nil {
		return err
	}
	fmt.Fprintf(&text, "{\n  \"provenance\": %s,\n  \"planned\": %d,\n  \"trials\": [", provenance, f.Planned)
	for i, trial := range f.Trials {
		line, err := json.Marshal(trial)
		if err != nil {
			return err
		}
		if i > 0 {
			text.WriteByte(',')
		}
		fmt.Fprintf(&text, "\n    %s", line)
	}
	text.WriteString("\n  ]\n}\n")
	return Replace(path, text.Bytes())
}

// Replace writes a file by way of a temporary one beside it.
func Replace(path string, data []byte) error {
	temp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name()) // fails once it is renamed
	_, err = temp.Write(data)
	err = errors.Join(err, temp.Chmod(0o644), temp.Sync(), temp.Close())
	if err != nil {
		return err
	}
	return os.Rename(temp.Name(), path)
}

// Lock keeps other runs from writing the same file until unlock is called, or the
// process ends.
func Lock(path string) (unlock func(), err error) {
	name := path + ".lock"
	for {
		file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return nil, err
		}
		if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			file.Close()
			return nil, fmt.Errorf("another run is writing %s (it holds %s): wait for it, or choose another -out", path, name)
		}
		if isStill(file, name) {
			return func() {
				os.Remove(name) // before the lock goes, so that nobody can have it yet
				file.Close()
			}, nil
		}
		file.Close() // its last owner removed it while this was waiting to open it
	}
}

// isStill reports whether a name still leads to an open file.
func isStill(file *os.File, name string) bool {
	opened, err := file.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(name)
	return err == nil && os.SameFile(opened, named)
}
