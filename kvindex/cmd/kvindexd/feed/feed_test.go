// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
)

// follow runs a feed into a recorder until the test ends.
func follow(t testing.TB, at Source, r *recorder) {
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		Run(ctx, slog.New(slog.DiscardHandler), at, r)
		close(done)
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
}

func TestWhoComesLateGetsWhatWasBefore(t *testing.T) {
	for name, topic := range map[string][][]byte{"to 0.25": nil, "from 0.28": {nil}, "with a topic": {[]byte("topic")}} {
		t.Run(name, func(t *testing.T) {
			at, r := source(t), new(recorder)
			p := publish(t, at)
			p.topic = topic
			p.send(false, "a", "b")
			follow(t, at, r)
			r.untilHas(t, "a", "b")
			p.send(false, "c")
			r.untilHas(t, "a", "b", "c")
		})
	}
}

func TestNothingPublishedIsKnown(t *testing.T) {
	at, r := source(t), new(recorder)
	publish(t, at)
	follow(t, at, r)
	r.until(t, "untouched", func() bool { return r.untouched && r.connected })
}

func TestAGapIsFilledByTheReplay(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	follow(t, at, r)
	r.until(t, "connected", func() bool { return r.connected })
	p.send(false, "a")
	p.send(true, "b", "c")
	p.send(false, "d")
	r.untilHas(t, "a", "b", "c", "d")
	r.until(t, "dropped nothing", func() bool { return len(r.drops) == 0 && r.missed > 0 })
}

func TestWhatWasLostIsAskedForWithoutAnotherBatch(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	follow(t, at, r)
	r.until(t, "connected", func() bool { return r.connected })
	p.send(false, "a")
	p.send(true, "b")
	r.untilHas(t, "a", "b")
}

// TestWhoPublishesNothingIsNotAskedForever: nor is each time that somebody falls silent
// paid for with a connection, however many instances there are.
func TestWhoPublishesNothingIsNotAskedForever(t *testing.T) {
	c := checks{quiet: quietCheck, again: true}
	if after, ok := c.done(false); !ok || after != quietCheck {
		t.Errorf("the second check comes after %v, %v", after, ok)
	}
	for range 20 {
		if after, ok := c.done(false); ok {
			t.Errorf("there is a further check after %v", after)
		}
	}
	if c.quiet != longestQuiet {
		t.Errorf("silence is looked at after %v", c.quiet)
	}
	if after, ok := c.done(true); !ok || after != quietCheck {
		t.Errorf("after a loss the next check comes after %v, %v", after, ok)
	}
}

// announce accepts connections, shakes hands as a publisher, and claims a frame.
func announce(t *testing.T, at Endpoint, hello, frame []byte) {
	t.Helper()
	listener, err := net.Listen("unix", strings.TrimPrefix(string(at), "ipc://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			conn.Write(append(slices.Clone(hello), frame...))
		}
	}()
}

// TestAFrameIsAllocatedAsItComes: a publisher that claims much and sends nothing costs
// nothing, in the handshake neither.
func TestAFrameIsAllocatedAsItComes(t *testing.T) {
	greet := append([]byte(greeting), make([]byte, greetingBytes-len(greeting))...)
	isReady := appendFrame(greet, flagCommand, []byte(ready+socketTypeKey+"\x00\x00\x00\x03PUB"))
	for name, claim := range map[string]struct {
		hello []byte
		size  uint64
	}{
		"a message":            {isReady, maxMessageBytes},
		"one that is too long": {isReady, maxMessageBytes + 1},
		"one that cannot be":   {isReady, 1 << 63},
		"a handshake":          {greet, 1 << 40},
	} {
		t.Run(name, func(t *testing.T) {
			at := Endpoint("ipc://" + t.TempDir() + "/events")
			announce(t, at, claim.hello, binary.BigEndian.AppendUint64([]byte{flagLong}, claim.size))
			ctx, stop := context.WithCancel(context.Background())
			defer stop()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			p, err := dial(ctx, at, subscriber)
			if err == nil {
				p.conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
				_, err = p.receive()
			}
			runtime.ReadMemStats(&after)
			if err == nil {
				t.Error("read")
			}
			if allocated := after.TotalAlloc - before.TotalAlloc; allocated > 1<<20 {
				t.Errorf("%d bytes allocated", allocated)
			}
		})
	}
}

// TestALongFrameIsReadWhole, and what queues is bounded in bytes, not in messages alone.
func TestALongFrameIsReadWhole(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	p.send(false, strings.Repeat("long ", 1<<16))
	follow(t, at, r)
	r.untilHas(t, strings.Repeat("long ", 1<<16))
}

func TestWhatQueuesIsBoundedInBytes(t *testing.T) {
	q := newQueue()
	ctx, stop := context.WithCancel(context.Background())
	stop()
	large := message{batch: make([]byte, 10<<20)}
	bytes := 0
	for q.enter(ctx, large) == nil {
		bytes += len(large.batch)
	}
	if bytes > maxQueuedParts*partBytes {
		t.Errorf("%d bytes queue", bytes)
	}
	q = newQueue()
	if err := q.enter(context.Background(), message{batch: make([]byte, maxQueuedParts*partBytes+1)}); err != nil {
		t.Error("a message that is larger than the queue:", err)
	}
}

func TestAReplayWithAHoleIsAskedForAgain(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	p.hole = 7
	var all []string
	for n := range 20 {
		all = append(all, fmt.Sprint(n))
	}
	p.send(true, all...)
	follow(t, at, r)
	r.untilHas(t, all...)
}

func TestWhatCanNoLongerBeReplayedVoidsWhatWasTaken(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	p.keep = 2
	p.send(false, "a")
	follow(t, at, r)
	r.untilHas(t, "a")
	p.send(true, "b", "c", "d")
	r.untilHas(t, "c", "d")
	r.until(t, "one dropped", func() bool { return len(r.drops) == 1 })
}

func TestWithoutAReplayAGapVoidsWhatWasTaken(t *testing.T) {
	at, r := source(t), new(recorder)
	at.Replay = ""
	p := publish(t, at)
	follow(t, at, r)
	r.until(t, "connected", func() bool { return r.connected })
	for n := 0; ; n++ { // until the subscription is there
		p.send(false, fmt.Sprint(n))
		time.Sleep(time.Millisecond)
		if r.Position().Next > 0 {
			break
		}
	}
	p.send(true, "lost")
	p.send(false, "x")
	r.untilHas(t, "x")
}

// TestAPublisherThatStartsAnewVoidsWhatWasTaken: also if it is soon further than the one
// before ever was, so that no number goes back.
func TestAPublisherThatStartsAnewVoidsWhatWasTaken(t *testing.T) {
	for _, batches := range [][]string{nil, {"x"}, {"x", "y", "z", "u", "v"}} {
		t.Run(fmt.Sprint(len(batches)), func(t *testing.T) {
			at, r := source(t), new(recorder)
			p := publish(t, at)
			p.send(false, "a", "b", "c")
			follow(t, at, r)
			r.untilHas(t, "a", "b", "c")
			p.stop()
			r.until(t, "disconnected", func() bool { return !r.connected })
			publish(t, at).send(false, batches...)
			r.untilHas(t, batches...)
			r.until(t, "connected", func() bool { return r.connected })
		})
	}
}

// TestNumbersThatBeginAnewAreOfAnotherPublisher: on one connection, as behind a forwarder.
func TestNumbersThatBeginAnewAreOfAnotherPublisher(t *testing.T) {
	for _, replays := range []bool{true, false} {
		t.Run(fmt.Sprint(replays), func(t *testing.T) {
			at, r := source(t), new(recorder)
			own := at
			if !replays {
				own.Replay = ""
			}
			p := publish(t, at)
			follow(t, own, r)
			r.until(t, "connected", func() bool { return r.connected })
			for n := 0; r.Position().Next < 3; n++ { // until the subscription is there
				p.send(false, fmt.Sprint(n))
				time.Sleep(time.Millisecond)
			}
			p.mu.Lock()
			p.number, p.batches = 0, nil
			p.mu.Unlock()
			p.send(false, "a", "b")
			r.untilHas(t, "a", "b")
		})
	}
}

func TestALostConnectionToTheSamePublisherVoidsNothing(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	p.send(false, "a", "b")
	r.Take(0, []byte("a")) // as from a snapshot
	follow(t, at, r)
	r.untilHas(t, "a", "b")
	r.until(t, "dropped nothing", func() bool { return len(r.drops) == 0 && r.connected })
}

func TestASnapshotOfAnotherPublisherIsVoid(t *testing.T) {
	at, r := source(t), new(recorder)
	p := publish(t, at)
	p.send(false, "a", "b")
	r.Take(0, []byte("something else"))
	follow(t, at, r)
	r.untilHas(t, "a", "b")
}

// TestWhateverIsLostAllIsTakenInOrder: publishers come and go, and lose what they like.
func TestWhateverIsLostAllIsTakenInOrder(t *testing.T) {
	at, r := source(t), new(recorder)
	random := rand.New(rand.NewPCG(1, 1))
	follow(t, at, r)
	for life := range 4 {
		p := publish(t, at)
		var sent []string
		for n := range 300 {
			batch := fmt.Sprint(life, " ", n)
			p.send(random.IntN(4) == 0, batch)
			sent = append(sent, batch)
			if random.IntN(20) == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		r.until(t, "all of it", func() bool { return slices.Equal(r.batches, sent) })
		p.stop()
	}
}

func TestWhatIsNoEndpointIsRefused(t *testing.T) {
	for _, bad := range []Endpoint{"", "tcp://", "tcp://host", "tcp://*:5557", "tcp://host:0", "tcp://host:99999", "ipc://", "http://a:1", "a:1"} {
		if bad.Check() == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	for _, good := range []Endpoint{"tcp://host:1", "tcp://[::1]:1", "ipc:///run/events"} {
		if err := good.Check(); err != nil {
			t.Error(err)
		}
	}
}

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
