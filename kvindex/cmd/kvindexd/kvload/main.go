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
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/tinylib/msgp/msgp"
	"kvtax/kvindex/cmd/kvindexd/blockhash"
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

// publishers stand for the instances: each has a PUB and a ROUTER socket, as vLLM has.
type publishers struct {
	all    []*publisher
	load   *load
	events atomic.Int64
	ending chan struct{}
	ended  sync.WaitGroup
}

type publisher struct {
	events, replay string
	pub, router    zmq4.Socket

	mu      sync.Mutex
	batches [][]byte
}

// publishAll starts instances that have stored what they hold of the prompts.
func publishAll(l *load, folder string, prompts []prompt) (*publishers, error) {
	p := &publishers{load: l, ending: make(chan struct{})}
	for n := range l.Instances {
		instance := &publisher{
			events: fmt.Sprintf("ipc://%s/%d", folder, n),
			replay: fmt.Sprintf("ipc://%s/%d.replay", folder, n),
			pub:    zmq4.NewPub(context.Background()),
			router: zmq4.NewRouter(context.Background()),
		}
		p.all = append(p.all, instance)
		for i := range prompts {
			if held := prompts[i].held[n]; held > 0 {
				instance.batches = append(instance.batches, stored(prompts[i].hashes[:held], prompts[i].ids, l.BlockTokens))
			}
		}
		if err := instance.pub.Listen(instance.events); err != nil {
			return nil, err
		}
		if err := instance.router.Listen(instance.replay); err != nil {
			return nil, err
		}
		go instance.repeat()
	}
	return p, nil
}

// write lets some of the instances publish, each so many batches per second.
func (p *publishers) write(writers, perSecond int) {
	for n := range writers {
		p.ended.Go(func() {
			random := rand.NewChaCha8([32]byte{byte(n)})
			tick := time.NewTicker(time.Second / time.Duration(perSecond))
			defer tick.Stop()
			var earlier [][]byte
			for {
				select {
				case <-p.ending:
					return
				case <-tick.C:
				}
				var batch []byte
				batch, earlier = turnover(random, earlier, p.load.BlockTokens)
				p.all[n].publish(batch)
				p.events.Add(int64(1 + len(earlier)))
			}
		})
	}
}

// stop ends the writing and returns how many events were published.
func (p *publishers) stop() int64 {
	close(p.ending)
	p.ended.Wait()
	return p.events.Load()
}

func (p *publishers) close() {
	for _, publisher := range p.all {
		publisher.pub.Close()
		publisher.router.Close()
	}
}

func (p *publisher) publish(batch []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	number := binary.BigEndian.AppendUint64(nil, uint64(len(p.batches)))
	p.batches = append(p.batches, batch)
	p.pub.Send(zmq4.NewMsgFrom(nil, number, batch))
}

// repeat answers replays.
func (p *publisher) repeat() {
	for {
		request, err := p.router.Recv()
		if err != nil {
			return
		}
		p.mu.Lock()
		for n := binary.BigEndian.Uint64(request.Frames[2]); n < uint64(len(p.batches)); n++ {
			p.router.Send(zmq4.NewMsgFrom(request.Frames[0], nil, nil, binary.BigEndian.AppendUint64(nil, n), p.batches[n]))
		}
		p.router.Send(zmq4.NewMsgFrom(request.Frames[0], nil, nil, binary.BigEndian.AppendUint64(nil, 1<<64-1), nil))
		p.mu.Unlock()
	}
}

// stored is a batch that says that the blocks of a prompt are there.
func stored(hashes [][]byte, ids []uint32, tokens int) []byte {
	b := appendStored(begin(1), hashes, tokens, true)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(len(hashes)*tokens))
	for _, id := range ids[:len(hashes)*tokens] {
		b = msgp.AppendUint32(b, id)
	}
	return msgp.AppendInt(b, 0)
}

// turnover is a batch that says that 16 new blocks are there, and those before are not.
func turnover(random *rand.ChaCha8, earlier [][]byte, tokens int) (batch []byte, now [][]byte) {
	for range 16 {
		hash := make([]byte, 32)
		random.Read(hash)
		now = append(now, hash)
	}
	b := appendStored(begin(1+len(earlier)), now, tokens, false)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(16*tokens))
	for n := range 16 * tokens {
		b = msgp.AppendUint32(b, uint32(n*7919)%150_000)
	}
	for _, hash := range earlier {
		b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 3), "type"), "BlockRemoved")
		b = appendHashes(b, [][]byte{hash})
		b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	}
	return msgp.AppendInt(b, 0), now
}

func begin(events int) []byte {
	b := msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 3), float64(time.Now().UnixNano())/1e9)
	return msgp.AppendArrayHeader(b, uint32(events))
}

// appendStored appends an event without its last field, the token ids.
func appendStored(b []byte, hashes [][]byte, tokens int, first bool) []byte {
	b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 6), "type"), "BlockStored")
	b = appendHashes(b, hashes)
	b = msgp.AppendString(b, "parent_block_hash")
	if first {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendBytes(b, make([]byte, 32))
	}
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), tokens)
	return msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
}

func appendHashes(b []byte, hashes [][]byte) []byte {
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(len(hashes)))
	for _, hash := range hashes {
		b = msgp.AppendBytes(b, hash)
	}
	return b
}

const hashSeed = "0"

// A prompt is what is asked for, and what the answer must be.
type prompt struct {
	ids     []uint32
	hashes  [][]byte
	held    []int // leading blocks, by instance
	request []byte
}

// makePrompts returns prompts of random ids, of which instances hold the more the higher
// their number.
func makePrompts(l *load) []prompt {
	random := rand.New(rand.NewPCG(1, 1))
	hasher := blockhash.New(blockhash.SHA256)
	prompts := make([]prompt, l.Prompts)
	for n := range prompts {
		prompt := &prompts[n]
		prompt.ids = make([]uint32, l.IDs)
		for i := range prompt.ids {
			prompt.ids[i] = random.Uint32N(150_000)
		}
		hash := hasher.Seed(hashSeed)
		for start := 0; start+l.BlockTokens < l.IDs; start += l.BlockTokens {
			hash = hasher.Block(&hash, prompt.ids[start:start+l.BlockTokens], nil)
			prompt.hashes = append(prompt.hashes, bytes.Clone(hash.Bytes()))
		}
		for instance := range l.Instances {
			prompt.held = append(prompt.held, len(prompt.hashes)*(instance+1)/l.Instances)
		}
		prompt.request = request(prompt.ids, l.JSON)
	}
	return prompts
}

func request(ids []uint32, asJSON bool) []byte {
	kind, body := "application/octet-stream", []byte(nil)
	if asJSON {
		kind = "application/json"
		body, _ = json.Marshal(ids)
	} else {
		for _, id := range ids {
			body = binary.LittleEndian.AppendUint32(body, id)
		}
	}
	head := fmt.Sprintf("POST /v1/lookup HTTP/1.1\r\nHost: kvindexd\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n", kind, len(body))
	return append([]byte(head), body...)
}

// check compares an answer with what the instances hold.
func (p *prompt) check(answer []byte) error {
	var response struct{ Instances []struct{ Blocks int } }
	if err := json.Unmarshal(answer, &response); err != nil {
		return fmt.Errorf("%w: %s", err, answer)
	}
	if len(response.Instances) != len(p.held) {
		return fmt.Errorf("%d instances, not %d", len(response.Instances), len(p.held))
	}
	for n, instance := range response.Instances {
		if instance.Blocks != p.held[n] {
			return fmt.Errorf("instance %d: %d blocks, not %d", n, instance.Blocks, p.held[n])
		}
	}
	return nil
}
