// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

// TestReadersSeeOnlyWhatWasThere: each key's pods always name the key, so a set that
// belongs to another key, or was put together from two, shows.
func TestReadersSeeOnlyWhatWasThere(t *testing.T) {
	const keys, rounds = 64, 4_000
	x := newIndex(t, keys/2, 2) // so that keys come and go
	pods := func(key uint64) (string, string) { return fmt.Sprint(key, "a"), fmt.Sprint(key, "b") }
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	for w := range 3 {
		writers.Go(func() {
			random := rand.New(rand.NewPCG(uint64(w), 2))
			for range rounds {
				key := random.Uint64N(keys)
				a, b := pods(key)
				switch random.IntN(4) {
				case 0:
					x.Add([]uint64{key}, a)
				case 1:
					x.Add([]uint64{key}, a, b)
				case 2:
					x.Evict(key, a)
				default:
					x.Evict(key, a, b)
				}
			}
		})
	}
	all := make([]uint64, keys)
	for i := range all {
		all[i] = uint64(i)
	}
	for range 3 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				for i, found := range x.Lookup(all, nil) {
					a, b := pods(all[i])
					for _, pod := range found {
						if pod != a && pod != b {
							t.Errorf("key %d has %v", all[i], found)
							return
						}
					}
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	check(t, x)
}

// TestNoUpdateIsLost: each writer adds and evicts a pod of its own at the same keys, while
// readers mark them as read in one epoch after the other.
func TestNoUpdateIsLost(t *testing.T) {
	const writers, keys, rounds = 4, 64, 2_000
	x := newIndex(t, 1<<10, writers)
	all := chain(1, keys)
	var held [writers][keys]bool
	var writing, reading sync.WaitGroup
	stop := make(chan struct{})
	for w := range writers {
		writing.Go(func() {
			random := rand.New(rand.NewPCG(uint64(w), 3))
			pod := fmt.Sprint("pod", w)
			for round := range uint64(rounds) {
				key := random.IntN(keys)
				if held[w][key] {
					x.Evict(all[key], pod)
				} else {
					x.Add(all[key:key+1], pod)
				}
				held[w][key] = !held[w][key]
				// Admissions bring the next epoch.
				passing := chain(2+uint64(w)<<20+round, 8)
				x.Add(passing, pod)
				for _, key := range passing {
					x.Evict(key, pod)
				}
			}
		})
	}
	for range 2 {
		reading.Go(func() {
			scores := make([]PodScore[string], 0, writers)
			for {
				select {
				case <-stop:
					return
				default:
					for i := range all {
						scores = x.Score(all[i:], scores)
					}
				}
			}
		})
	}
	writing.Wait()
	close(stop)
	reading.Wait()
	check(t, x)
	want := map[uint64][]string{}
	for i, key := range all {
		for w := range writers {
			if held[w][i] {
				want[key] = append(want[key], fmt.Sprint("pod", w))
			}
		}
	}
	if got := contents(x, all); !maps.EqualFunc(got, want, slices.Equal) {
		t.Fatalf("got %v, want %v", got, want)
	}
	if x.queue.epoch < 100 {
		t.Fatalf("only %d epochs went by", x.queue.epoch)
	}
}

// TestWhatStaysIsAlwaysFound: the readers' chain is held by one pod all the time, while
// others come and go, block by block, and its runs are made anew, shared with branches.
func TestWhatStaysIsAlwaysFound(t *testing.T) {
	const keys, rounds = 200, 1_500
	x := newIndex(t, 20_000, 4)
	all := chain(1, keys)
	x.Add(all, "stays")
	var writing, reading sync.WaitGroup
	stop := make(chan struct{})
	for w := range 3 {
		writing.Go(func() {
			random := rand.New(rand.NewPCG(uint64(w), 4))
			pod := fmt.Sprint("pod", w)
			for round := range uint64(rounds) {
				from := random.IntN(keys)
				part := all[from : from+1+random.IntN(keys-from)]
				switch random.IntN(4) {
				case 0:
					x.Add(part, pod)
				case 1:
					for _, key := range slices.Backward(part) {
						x.Evict(key, pod)
					}
				case 2:
					x.Clear(pod)
				default: // a branch, in pieces
					branch := slices.Concat(all[:from], chain(2+uint64(w)<<20+round%4, 40))
					for i := from; i < len(branch); i += 3 {
						x.Add(branch[i:min(i+3, len(branch))], pod)
					}
					x.Score(branch, nil)
				}
			}
		})
	}
	for range 2 {
		reading.Go(func() {
			var found []PodScore[string]
			for {
				select {
				case <-stop:
					return
				default:
				}
				found = x.Score(all, found)
				i := slices.IndexFunc(found, func(s PodScore[string]) bool { return s.Pod == "stays" })
				if i < 0 || found[i].Blocks != keys {
					t.Errorf("found %v", found)
					return
				}
			}
		})
	}
	writing.Wait()
	close(stop)
	reading.Wait()
	check(t, x)
}
