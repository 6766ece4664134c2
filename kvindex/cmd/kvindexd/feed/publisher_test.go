// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
)

const deadline = 20 * time.Second

// A publisher publishes as vLLM's ZmqEventPublisher does, and can lose what it publishes.
type publisher struct {
	t      testing.TB
	pub    zmq4.Socket
	router zmq4.Socket
	topic  [][]byte // in a replay; vLLM to 0.25 has none

	mu      sync.Mutex
	number  uint64
	batches []message
	keep    int
	hole    uint64 // the next replay leaves out every hole-th batch
}

func source(t testing.TB) Source {
	folder := t.TempDir()
	return Source{Endpoint("ipc://" + folder + "/events"), Endpoint("ipc://" + folder + "/replay")}
}

func publish(t testing.TB, at Source) *publisher {
	t.Helper()
	p := &publisher{t: t, keep: 1 << 20, topic: [][]byte{nil}}
	p.pub = zmq4.NewPub(context.Background())
	p.router = zmq4.NewRouter(context.Background())
	for socket, endpoint := range map[zmq4.Socket]Endpoint{p.pub: at.Events, p.router: at.Replay} {
		if endpoint != "" {
			if err := socket.Listen(string(endpoint)); err != nil {
				t.Fatal(err)
			}
		}
	}
	go p.replay()
	t.Cleanup(p.stop)
	return p
}

func (p *publisher) stop() {
	p.pub.Close()
	p.router.Close()
}

// send publishes batches that say what they are; none arrives if they are lost.
func (p *publisher) send(lost bool, batches ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, batch := range batches {
		m := message{p.number, []byte(batch)}
		p.number++
		p.batches = append(p.batches, m)
		p.batches = p.batches[max(0, len(p.batches)-p.keep):]
		if !lost {
			p.pub.Send(zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, m.number), m.batch))
		}
	}
}

func (p *publisher) replay() {
	for {
		asked, err := p.router.Recv()
		if err != nil {
			return
		}
		p.mu.Lock()
		from := binary.BigEndian.Uint64(asked.Frames[2])
		before := append([][]byte{asked.Frames[0], nil}, p.topic...)
		for _, m := range append(slices.Clone(p.batches), message{endOfReplay, nil}) {
			left := p.hole > 0 && m.number != endOfReplay && m.number%p.hole == p.hole-1
			if m.number >= from && !left {
				p.router.Send(zmq4.NewMsgFrom(append(slices.Clone(before), binary.BigEndian.AppendUint64(nil, m.number), m.batch)...))
			}
		}
		p.hole = 0
		p.mu.Unlock()
	}
}

// A recorder is a Taker that keeps the batches themselves.
type recorder struct {
	mu        sync.Mutex
	position  Position
	batches   []string
	drops     []string
	missed    uint64
	connected bool
	untouched bool
}

func (r *recorder) Position() Position {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.position
}

func (r *recorder) Take(number uint64, batch []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.batches = append(r.batches, string(batch))
	r.position = Position{number + 1, Digest(batch)}
}

func (r *recorder) Drop(why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.batches, r.position = nil, Position{}
	r.drops = append(r.drops, why)
}

func (r *recorder) Untouched() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.untouched = true
}

func (r *recorder) Missed(n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.missed += n
}

func (r *recorder) Connected()         { r.set(true) }
func (r *recorder) Disconnected(error) { r.set(false) }

func (r *recorder) set(connected bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.connected = connected
}

// until waits for something to be true of the recorder.
func (r *recorder) until(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(deadline); ; time.Sleep(time.Millisecond) {
		r.mu.Lock()
		done := is()
		state := fmt.Sprintf("%d batches, %q dropped, connected %v", len(r.batches), r.drops, r.connected)
		r.mu.Unlock()
		if done {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("never: %s; there are %s", what, state)
		}
	}
}

func (r *recorder) untilHas(t testing.TB, batches ...string) {
	t.Helper()
	r.until(t, fmt.Sprint(batches), func() bool { return slices.Equal(r.batches, batches) })
}
