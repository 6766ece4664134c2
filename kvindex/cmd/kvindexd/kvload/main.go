// SPDX-License-Identifier: Apache-2.0

// Kvload measures a kvindexd end to end: it stands for instances that publish KV events
// over ZMQ, and for a router that asks over a Unix socket, one prompt after the other.
//
//	kvload -kvindexd ../bin/kvindexd -block-tokens 16
//
// Every answer is checked. It prints one JSON object.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"syscall"
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
	result, err := l.run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvload:", err)
		os.Exit(1)
	}
	json.NewEncoder(os.Stdout).Encode(result)
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
		prompt := &prompts[n%l.Prompts]
		answer, took, err := served.timed(prompt.request)
		if err == nil {
			err = prompt.check(answer)
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

const deadline = time.Minute

// served is the kvindexd that is measured, and a connection to it.
type served struct {
	process *exec.Cmd
	conn    net.Conn
	reader  *bufio.Reader
}

func start(l *load, folder string, fleet *publishers) (*served, error) {
	socket := folder + "/socket"
	process := exec.Command(l.Program, "-listen", "unix://"+socket, "-hash-seed", hashSeed)
	for n, publisher := range fleet.all {
		process.Args = append(process.Args, "-instance", fmt.Sprintf("i%d=%s,%s", n, publisher.events, publisher.replay))
	}
	process.Stderr = os.Stderr
	process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := process.Start(); err != nil {
		return nil, err
	}
	s := &served{process: process}
	for end := time.Now().Add(deadline); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			s.conn, s.reader = conn, bufio.NewReader(conn)
			return s, nil
		}
	}
	s.stop()
	return nil, errors.New("kvindexd does not listen")
}

// settle waits until all that was published has been taken.
func (s *served) settle(fleet *publishers) error {
	for end := time.Now().Add(deadline); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		answer, err := s.ask([]byte("GET /healthz HTTP/1.1\r\nHost: kvindexd\r\n\r\n"))
		if err != nil {
			return err
		}
		var health struct {
			Instances []struct {
				Connected bool
				NextBatch int `json:"next_batch"`
			}
		}
		if err := json.Unmarshal(answer, &health); err != nil {
			return err
		}
		current := 0
		for n, instance := range health.Instances {
			if instance.Connected && instance.NextBatch == len(fleet.all[n].batches) {
				current++
			}
		}
		if current == len(fleet.all) {
			return nil
		}
	}
	return errors.New("kvindexd does not take all events")
}

// ask sends a request as it is, and returns the answer's body.
func (s *served) ask(request []byte) ([]byte, error) {
	if _, err := s.conn.Write(request); err != nil {
		return nil, err
	}
	answer, err := http.ReadResponse(s.reader, nil)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", answer.Status, body)
	}
	return body, err
}

// timed is ask, a moment later, and the time it took.
func (s *served) timed(request []byte) ([]byte, time.Duration, error) {
	time.Sleep(time.Millisecond) // as requests come to a router
	began := time.Now()
	answer, err := s.ask(request)
	return answer, time.Since(began), err
}

// peakRSSMiB is what the process has taken at most until now.
func (s *served) peakRSSMiB() float64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.process.Process.Pid))
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(status) {
		var kib float64
		if n, _ := fmt.Sscanf(string(line), "VmHWM: %f kB", &kib); n == 1 {
			return kib / 1024
		}
	}
	return 0
}

func (s *served) stop() {
	s.process.Process.Signal(syscall.SIGTERM)
	s.process.Wait()
}
