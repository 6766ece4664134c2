// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"

	lru "github.com/hashicorp/golang-lru/v2"
)

// The designs whose locking is compared, by number: this index, and an LRU of keys over
// LRUs of pods, as llm-d-kv-cache has, read by Get or by Peek. Get moves what it reads to
// the front under an exclusive lock; Peek shares a lock and moves nothing.
var designs = [...]string{"kvindex", "nested LRU, Get", "nested LRU, Peek"}

const peekDesign = 2

// A nested is an LRU of keys over LRUs of pods.
type nested struct {
	pods  int
	peek  bool
	keys  *lru.Cache[uint64, *lru.Cache[string, struct{}]]
	write sync.Mutex // a key is made by one writer
}

func newNested(capacity, pods int, peek bool) (*nested, error) {
	keys, err := lru.New[uint64, *lru.Cache[string, struct{}]](capacity)
	return &nested{pods: pods, peek: peek, keys: keys}, err
}

func (n *nested) of(key uint64) *lru.Cache[string, struct{}] {
	n.write.Lock()
	defer n.write.Unlock()
	pods, ok := n.keys.Get(key)
	if !ok {
		pods, _ = lru.New[string, struct{}](n.pods)
		n.keys.Add(key, pods)
	}
	return pods
}

func (n *nested) Add(chain []uint64, pods ...string) {
	for _, key := range chain {
		of := n.of(key)
		for _, pod := range pods {
			of.Add(pod, struct{}{})
		}
	}
}

func (n *nested) Evict(key uint64, pods ...string) bool {
	of, ok := n.keys.Peek(key)
	if !ok {
		return false
	}
	for _, pod := range pods {
		of.Remove(pod)
	}
	return of.Len() == 0 && n.keys.Remove(key)
}

func (n *nested) Score(chain []uint64, scores []score) []score {
	scores = scores[:0]
	read := n.keys.Get
	if n.peek {
		read = n.keys.Peek
	}
	leading := map[string]int{}
	for i, key := range chain {
		pods, ok := read(key)
		if !ok {
			break
		}
		going := false
		for _, pod := range pods.Keys() {
			if leading[pod] == i {
				leading[pod] = i + 1
				going = true
			}
		}
		if !going {
			break
		}
	}
	for pod, blocks := range leading {
		scores = append(scores, score{Pod: pod, Blocks: blocks})
	}
	return scores
}

// recency reads one prompt between many new blocks, and counts what is left of it.
func recency(a arguments) (result, error) {
	const capacity, turns, fresh = 8_192, 40, 1_024
	x, err := newStore(a, capacity, 1)
	if err != nil {
		return result{}, err
	}
	prompt := newChain(0, a.get("blocks", 263))
	x.Add(prompt, podNames[0])
	var scores []score
	for turn := range turns {
		x.Score(prompt, scores)
		x.Add(newChain(uint64(1_000_000+turn*fresh), fresh), podNames[1])
	}
	var r result
	for _, s := range x.Score(prompt, scores) {
		if s.Pod == podNames[0] {
			r.Kept = s.Blocks
		}
	}
	return r, nil
}

// locked is what the command locks measures, with what it was measured on.
type locked struct {
	Provenance provenance `json:"provenance"`
	Designs    []locks    `json:"designs"`
}

// locks are a design's bursts, a value for each round.
type locks struct {
	Design     string    `json:"design"`
	P50Us      []float64 `json:"p50_us"`
	P99Us      []float64 `json:"p99_us"`
	EventsPerS []float64 `json:"events_per_s"`
	KeptBlocks int       `json:"kept_blocks"`
}

const (
	lockArguments = "readers=64 blocks=263 holders=10 bursts=16"
	lockBegin     = "<!-- kvbench-locks:begin -->\n"
	lockEnd       = "<!-- kvbench-locks:end -->"
)

func locksCommand(ctx context.Context, args []string, stderr io.Writer) error {
	flags := flag.NewFlagSet("kvbench locks", flag.ContinueOnError)
	flags.SetOutput(stderr)
	out := flags.String("out", "locks.json", "file for the results")
	readme := flags.String("readme", "README.md", "file whose lines between the markers are replaced")
	rounds := flags.Int("rounds", 5, "how often each design is measured")
	if err := flags.Parse(args); err != nil {
		return err
	}
	own, err := os.Executable()
	if err != nil {
		return err
	}
	r := &run{programs: [2]string{own}, rounds: *rounds, progress: stderr}
	file := locked{Provenance: newProvenance(ctx), Designs: make([]locks, len(designs))}
	file.Provenance.Rounds = *rounds
	for round := range *rounds {
		for n := range designs {
			number := (n + round) % len(designs)
			design := fmt.Sprintf(" design=%d", number)
			burst, err := r.one(ctx, newRow("burst", lockArguments+design, ""), round, 0)
			recency, other := r.one(ctx, newRow("recency", "blocks=263"+design, ""), round, 0)
			if err := errors.Join(err, other); err != nil {
				return fmt.Errorf("%s: %w", designs[number], err)
			}
			of := &file.Designs[number]
			of.Design, of.KeptBlocks = designs[number], recency.Result.Kept
			of.P50Us = append(of.P50Us, burst.Result.Latency.P50Us)
			of.P99Us = append(of.P99Us, burst.Result.Latency.P99Us)
			of.EventsPerS = append(of.EventsPerS, burst.Result.Events.PerS)
		}
	}
	data, err := json.MarshalIndent(file, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(*out, append(data, '\n'), 0o666); err != nil {
		return err
	}
	return replaceBetween(*readme, lockBegin, lockEnd, lockTable(file))
}

// lockTable says in Markdown what was measured.
func lockTable(file locked) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| 64 readers, 263 blocks, 40 writers | p50, µs | p99, µs | events a second | blocks kept of 263 |\n|---|---:|---:|---:|---:|\n")
	for _, d := range file.Designs {
		fmt.Fprintf(&b, "| %s | %s | %s | %.0f | %d |\n", d.Design, spread(d.P50Us), spread(d.P99Us), median(d.EventsPerS), d.KeptBlocks)
	}
	p := file.Provenance
	fmt.Fprintf(&b, "\nMedian [lowest, highest] of %d rounds of 16 bursts; %s, %s, %d cores, %s.\n", p.Rounds, p.Date[:10], p.CPU, p.Cores, p.Go)
	return b.String()
}

func spread(values []float64) string {
	return fmt.Sprintf("%.0f [%.0f, %.0f]", median(values), slices.Min(values), slices.Max(values))
}
