// SPDX-License-Identifier: Apache-2.0

// Kvload measures a kvindexd end to end: it stands for instances that publish KV events
// over ZMQ, and for a router that asks over a Unix socket, one prompt after the other.
//
//	kvload -kvindexd ../bin/kvindexd -block-tokens 16
//
// Every answer is checked. It prints one JSON object.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"time"
)

// load is what is asked of the kvindexd.
type load struct {
	Program     string `json:"-"`
	Instances   int    `json:"instances"`
	Writers     int    `json:"writers"`
	PerSecond   int    `json:"batches_per_second"` // of each writer
	IDs         int    `json:"ids"`
	BlockTokens int    `json:"block_tokens"`
	Prompts     int    `json:"prompts"`
	Requests    int    `json:"requests"`
	JSON        bool   `json:"json"`
}

// result is what came of it; times from the first byte of a request to the last of its
// answer.
type result struct {
	load
	P50Us           float64 `json:"p50_us"`
	P99Us           float64 `json:"p99_us"`
	OneIDP50Us      float64 `json:"one_id_p50_us"` // of a prompt of one id, asked in between
	EventsPerSecond float64 `json:"events_per_s"`
	PeakRSSMiB      float64 `json:"peak_rss_mib"`
}

func main() {
	var l load
	flag.StringVar(&l.Program, "kvindexd", "kvindexd", "the program to measure")
	flag.IntVar(&l.Instances, "instances", 64, "instances, each holding more of the prompts than the one before")
	flag.IntVar(&l.Writers, "writers", 40, "how many of them go on publishing: 16 blocks stored, 16 removed in a batch")
	flag.IntVar(&l.PerSecond, "batches-per-second", 100, "of each writer")
	flag.IntVar(&l.IDs, "ids", 33_000, "token ids of a prompt")
	flag.IntVar(&l.BlockTokens, "block-tokens", 16, "tokens of a block")
	flag.IntVar(&l.Prompts, "prompts", 16, "different prompts")
	flag.IntVar(&l.Requests, "requests", 2000, "lookups")
	flag.BoolVar(&l.JSON, "json", false, "ids as a JSON array")
	flag.Parse()
	found, err := l.run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvload:", err)
		os.Exit(1)
	}
	json.NewEncoder(os.Stdout).Encode(found)
}

func (l *load) run() (*result, error) {
	folder, err := os.MkdirTemp("", "kvload-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	prompts := makePrompts(l)
	fleet, err := publishAll(l, folder, prompts)
	if err != nil {
		return nil, err
	}
	defer fleet.close()
	served, err := start(l, folder, fleet)
	if err != nil {
		return nil, err
	}
	defer served.stop()
	if err := served.settle(fleet); err != nil {
		return nil, err
	}
	fleet.write(l.Writers, l.PerSecond)
	began := time.Now()
	whole, small, err := l.askAll(served, prompts)
	if err != nil {
		return nil, err
	}
	events := float64(fleet.stop()) / time.Since(began).Seconds()
	return &result{*l, percentileUs(whole, 50), percentileUs(whole, 99), percentileUs(small, 50), events, served.peakRSSMiB()}, nil
}

// askAll asks for the prompts in turn, and in between for one of a single id: what a
// request takes in any case. The first questions, which hash the prompts, do not count.
func (l *load) askAll(served *served, prompts []prompt) (whole, small []time.Duration, err error) {
	nothing := request([]uint32{1}, false)
	for n := range l.Requests + l.Prompts {
		one := &prompts[n%l.Prompts]
		answer, took, err := served.timed(one.request)
		if err == nil {
			err = one.check(answer)
		}
		if err != nil {
			return nil, nil, err
		}
		_, tookSmall, err := served.timed(nothing)
		if err != nil {
			return nil, nil, err
		}
		if n >= l.Prompts {
			whole, small = append(whole, took), append(small, tookSmall)
		}
	}
	return whole, small, nil
}

func percentileUs(took []time.Duration, percent int) float64 {
	slices.Sort(took)
	return float64(took[len(took)*percent/100].Nanoseconds()) / 1e3
}
