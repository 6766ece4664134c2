// SPDX-License-Identifier: Apache-2.0

// Package feed brings the KV events of one instance, each once and in order.
//
// vLLM numbers its batches from 0 and, where it has a replay endpoint, repeats the last
// ones on request (ZmqEventPublisher in vllm/distributed/kv_events.py). A publisher that
// starts anew begins with 0 again, and does not say so. But it has another connection, or
// behind a forwarder the same one, on which a number comes that is not above the one before.
// So whoever connects asks for the last batch that was taken: if the publisher does not
// repeat it to the byte, it is another one, and what was taken is void.
package feed

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/zeebo/xxh3"
)

// A Source is where an instance publishes. Without Replay, what is missed is lost.
type Source struct {
	Events Endpoint
	Replay Endpoint
}

// A Position is how far the batches of a publisher were taken.
type Position struct {
	Next uint64       // number of the next; 0 is the first
	Last xxh3.Uint128 // Digest of the one before
}

// Digest tells batches apart: each has the time of its making.
func Digest(batch []byte) xxh3.Uint128 { return xxh3.Hash128(batch) }

// A Taker keeps what a feed brings. All calls come from one goroutine.
type Taker interface {
	Position() Position
	// Take is given the batch of a number: the next one, or after Drop any.
	Take(number uint64, batch []byte)
	// Drop says that what was taken is void, and the position 0.
	Drop(why string)
	// Untouched says that the publisher has published nothing yet.
	Untouched()
	// Missed counts batches that did not come by themselves.
	Missed(batches uint64)
	// Connected says that all that was published has been taken; Disconnected, that
	// there is nobody to ask.
	Connected()
	Disconnected(why error)
}

const (
	// firstCheck comes soon: what was published while the subscription was on its way
	// shows with the next batch only, or if somebody asks.
	firstCheck = 200 * time.Millisecond
	// quietCheck of silence after batches: the last of them may be lost. The more often
	// none was, the longer the silence, up to longestQuiet.
	quietCheck    = 5 * time.Second
	longestQuiet  = 5 * time.Minute
	replayTimeout = 5 * time.Second
	shortestPause = 100 * time.Millisecond
	longestPause  = 2 * time.Second
	// vLLM's ROUTER to 0.30 drops what goes over its high-water mark of 1000, so that a
	// long replay comes in pieces.
	maxReplays = 100
	// Messages queue up to 64 MiB, counted in parts, or one that is larger.
	maxQueuedParts = 1024
	partBytes      = 1 << 16
)

// Run feeds a taker until ctx is done. It connects again for as long as that takes.
func Run(ctx context.Context, log *slog.Logger, source Source, taker Taker) {
	f := &feed{source: source, taker: taker}
	pause := shortestPause
	for ctx.Err() == nil {
		began := time.Now()
		err := f.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > longestPause {
			pause = shortestPause
			log.Warn("KV events: the connection is gone", "error", err)
		}
		f.taker.Disconnected(err)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
			pause = min(2*pause, longestPause)
		}
	}
}

type feed struct {
	source Source
	taker  Taker
	above  uint64 // what the next number on this connection is at least
	// taken are the last batches that were taken, by their numbers.
	taken [maxQueuedParts]Position
}

func (f *feed) take(m message) {
	f.taken[m.number%maxQueuedParts] = Position{m.number + 1, Digest(m.batch)}
	f.taker.Take(m.number, m.batch)
}

// beginsAnew reports whether a batch is of another publisher than those before it: its
// number goes back, or is that of another batch.
func (f *feed) beginsAnew(m message) bool {
	known := f.taken[m.number%maxQueuedParts]
	isOther := known.Next == m.number+1 && known.Last != Digest(m.batch)
	return m.number < f.above || m.number < f.taker.Position().Next && isOther
}

// follow takes what one connection brings, and returns why it ended.
func (f *feed) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	publisher, err := dial(ctx, f.source.Events, subscriber)
	if err != nil {
		return err
	}
	defer publisher.close()
	if err := publisher.subscribe(); err != nil {
		return err
	}
	if err := f.meet(ctx); err != nil {
		return err
	}
	f.above = 0
	f.taker.Connected()
	queue := newQueue()
	ended := make(chan error, 1)
	go func() { ended <- forward(ctx, publisher, queue) }()
	checks := checks{quiet: quietCheck, again: true}
	timer := time.NewTimer(firstCheck)
	for {
		select {
		case m := <-queue.messages:
			queue.leave(m)
			f.live(ctx, m)
			timer.Reset(checks.quiet)
		case <-timer.C:
			before := f.taker.Position()
			if err := f.catchUp(ctx); err != nil {
				return err
			}
			if after, ok := checks.done(f.taker.Position() != before); ok {
				timer.Reset(after)
			}
		case err := <-ended:
			return err
		}
	}
}

// checks say when to ask the replay endpoint whether a batch was lost. Who publishes
// nothing is not asked.
type checks struct {
	quiet time.Duration
	again bool // after the first check
}

// done notes whether a check has found a batch. It returns when the next is due even if
// none is published until then, if it is.
func (c *checks) done(found bool) (after time.Duration, ok bool) {
	switch {
	case found:
		c.quiet, ok = quietCheck, true
	case c.again:
		ok = true
	default:
		c.quiet = min(2*c.quiet, longestQuiet)
	}
	c.again = false
	return c.quiet, ok
}

// A queue is messages that were read and are not taken yet.
type queue struct {
	messages chan message
	parts    chan struct{}
}

func newQueue() *queue {
	return &queue{make(chan message, maxQueuedParts), make(chan struct{}, maxQueuedParts)}
}

func partsOf(m message) int { return min(1+len(m.batch)/partBytes, maxQueuedParts) }

func (q *queue) leave(m message) {
	for range partsOf(m) {
		<-q.parts
	}
}

// enter waits for room.
func (q *queue) enter(ctx context.Context, m message) error {
	for range partsOf(m) {
		select {
		case q.parts <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	q.messages <- m
	return nil
}

func forward(ctx context.Context, publisher *peer, queue *queue) error {
	for {
		m, err := publisher.receive()
		if err != nil {
			return err
		}
		if err := queue.enter(ctx, m); err != nil {
			return err
		}
	}
}

// meet finds out whether a publisher is the one whose batches were taken, and takes what
// it has published since.
func (f *feed) meet(ctx context.Context) error {
	if f.source.Replay == "" && f.taker.Position().Next > 0 {
		f.taker.Drop("a new connection, and no replay endpoint to ask who it is")
	}
	return f.catchUp(ctx)
}

// live takes a batch that came by itself. Those that a replay has brought are passed over.
func (f *feed) live(ctx context.Context, m message) {
	if f.beginsAnew(m) {
		f.taker.Drop(fmt.Sprintf("its numbers begin anew with %d", m.number))
	}
	f.above = m.number + 1
	next := f.taker.Position().Next
	if m.number > next {
		f.taker.Missed(m.number - next)
		if err := f.catchUp(ctx); err != nil {
			f.taker.Drop(fmt.Sprintf("batch %d was missed: %v", next, err))
		}
		next = f.taker.Position().Next
	}
	if m.number < next {
		return
	}
	if m.number > next && next > 0 {
		f.taker.Drop(fmt.Sprintf("batches %d to %d are lost", next, m.number-1))
	}
	f.take(m)
}

// catchUp takes what the publisher can repeat and was not taken.
func (f *feed) catchUp(ctx context.Context) error {
	if f.source.Replay == "" {
		return nil
	}
	for range maxReplays {
		again, err := f.replay(ctx)
		if err != nil || !again {
			return err
		}
	}
	return errors.New("the replay has holes, however often it is asked for")
}

// replay asks once, and says whether to ask again: because what was taken was void, or
// because there was a hole after a good beginning.
func (f *feed) replay(ctx context.Context) (again bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	peer, err := dial(ctx, f.source.Replay, dealer)
	if err != nil {
		return false, fmt.Errorf("replay: %w", err)
	}
	defer peer.close()
	first := f.taker.Position()
	from := max(first.Next, 1) - 1
	if err := peer.askForReplay(from); err != nil {
		return false, err
	}
	known := first.Next == 0 // the publisher is the one whose batches were taken
	for {
		peer.conn.SetReadDeadline(time.Now().Add(replayTimeout))
		m, err := peer.receive()
		switch next := f.taker.Position().Next; {
		case err != nil:
			return false, fmt.Errorf("replay: %w", err)
		case !known:
			known = m.number == from && Digest(m.batch) == first.Last
			if !known {
				f.taker.Drop("the publisher is another one, or has forgotten how far it was")
				return true, nil
			}
		case m.number == endOfReplay:
			if next == 0 {
				f.taker.Untouched()
			}
			return false, nil
		case m.number < next:
		case m.number > next && next > first.Next:
			return true, nil
		default:
			if m.number > next && next > 0 {
				f.taker.Drop(fmt.Sprintf("batches %d to %d are lost", next, m.number-1))
			}
			f.take(m)
		}
	}
}

const (
	handshakeTimeout = 5 * time.Second
	maxMessageBytes  = 1 << 28
	maxCommandBytes  = 1 << 12
	maxFrames        = 8
	// directBytes of a frame are allocated before they come; of a longer one no more than
	// twice what has come.
	directBytes = 1 << 16
)

// keepAlive finds out within 20 s that a host is gone which publishes nothing.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 3}

// A message is a batch and its number.
type message struct {
	number uint64
	batch  []byte
}

// endOfReplay is the number after the last message of a replay: -1.
const endOfReplay = 1<<64 - 1

// An Endpoint is a ZMQ address: tcp://HOST:PORT, or ipc://PATH.
type Endpoint string

// split returns what package net calls network and address.
func (e Endpoint) split() (network, address string, err error) {
	if path, ok := strings.CutPrefix(string(e), "ipc://"); ok && path != "" {
		return "unix", path, nil
	}
	address, ok := strings.CutPrefix(string(e), "tcp://")
	_, port, err := net.SplitHostPort(address)
	number, noPort := strconv.ParseUint(port, 10, 16)
	if !ok || err != nil || noPort != nil || number == 0 || strings.Contains(address, "*") {
		return "", "", fmt.Errorf("%q is no ZMQ endpoint to connect to: tcp://HOST:PORT or ipc://PATH is needed", string(e))
	}
	return "tcp", address, nil
}

// Check returns an error that says what is wrong with the endpoint.
func (e Endpoint) Check() error {
	_, _, err := e.split()
	return err
}

// A socketType is what a peer is, and whom it talks to.
type socketType struct {
	name  string
	peers []string
}

var (
	subscriber = socketType{"SUB", []string{"PUB", "XPUB"}}
	dealer     = socketType{"DEALER", []string{"ROUTER", "DEALER", "REP"}}
)

// A peer is a single ZMTP connection. A library's sockets would connect again in silence,
// and who answers then may be another publisher.
type peer struct {
	conn   net.Conn
	reader *bufio.Reader
}

// dial connects as a socket of a type. The connection is closed when ctx is done.
func dial(ctx context.Context, endpoint Endpoint, as socketType) (*peer, error) {
	network, address, err := endpoint.split()
	if err != nil {
		return nil, err
	}
	dialer := net.Dialer{Timeout: handshakeTimeout, KeepAliveConfig: keepAlive}
	conn, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { conn.Close() })
	p := &peer{conn: conn, reader: bufio.NewReaderSize(conn, 1<<16)}
	conn.SetDeadline(time.Now().Add(handshakeTimeout))
	if err := p.shakeHands(as); err != nil {
		conn.Close()
		return nil, fmt.Errorf("%s: %w", endpoint, err)
	}
	conn.SetDeadline(time.Time{})
	return p, nil
}

// greeting is that of ZMTP 3.0 without security: https://rfc.zeromq.org/spec/23.
const (
	greeting      = "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL"
	greetingBytes = 64
	ready         = "\x05READY"
	socketTypeKey = "\x0bSocket-Type"
)

func (p *peer) shakeHands(as socketType) error {
	hello := append([]byte(greeting), make([]byte, greetingBytes-len(greeting))...)
	properties := binary.BigEndian.AppendUint32([]byte(ready+socketTypeKey), uint32(len(as.name)))
	properties = append(properties, as.name...)
	if _, err := p.conn.Write(appendFrame(hello, flagCommand, properties)); err != nil {
		return err
	}
	var theirs [greetingBytes]byte
	if _, err := io.ReadFull(p.reader, theirs[:]); err != nil {
		return err
	}
	mechanism := string(bytes.TrimRight(theirs[12:32], "\x00"))
	if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || mechanism != "NULL" {
		return errors.New("it does not speak ZMTP 3 without security")
	}
	answer, flags, err := p.frame(maxCommandBytes)
	if err != nil {
		return err
	}
	_, rest, ok := bytes.Cut(answer, []byte(socketTypeKey))
	if flags&flagCommand == 0 || !bytes.HasPrefix(answer, []byte(ready)) || !ok || len(rest) < 4 {
		return errors.New("it is not ready")
	}
	size := binary.BigEndian.Uint32(rest)
	name := string(rest[4:min(uint64(len(rest)), 4+uint64(size))])
	if !slices.Contains(as.peers, name) {
		return fmt.Errorf("a %.20q socket, not one of %q", name, as.peers)
	}
	return nil
}

func (p *peer) close() { p.conn.Close() }

func (p *peer) subscribe() error {
	_, err := p.conn.Write(appendFrame(nil, 0, []byte{1}))
	return err
}

func (p *peer) askForReplay(from uint64) error {
	request := appendFrame(nil, flagMore, nil)
	_, err := p.conn.Write(appendFrame(request, 0, binary.BigEndian.AppendUint64(nil, from)))
	return err
}

// appendFrame appends a frame of less than 256 bytes.
func appendFrame(b []byte, flags byte, body []byte) []byte {
	return append(append(b, flags, byte(len(body))), body...)
}

// receive returns the next message: the last two frames, whatever is before them. That is
// a topic; in replays an empty frame, and a topic only from vLLM 0.28 on.
func (p *peer) receive() (message, error) {
	var last, before []byte
	left := uint64(maxMessageBytes)
	for n := 0; ; n++ {
		frame, flags, err := p.frame(left)
		switch {
		case err != nil:
			return message{}, err
		case flags&flagCommand != 0:
			continue
		case n == maxFrames:
			return message{}, fmt.Errorf("a message of more than %d frames", maxFrames)
		}
		left -= uint64(len(frame))
		before, last = last, frame
		if flags&flagMore == 0 {
			break
		}
	}
	if len(before) != 8 {
		return message{}, errors.New("a message without a number")
	}
	return message{binary.BigEndian.Uint64(before), last}, nil
}

// Flags of a frame: ZMTP 3.1, https://rfc.zeromq.org/spec/37.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// frame reads a frame of so many bytes at most.
func (p *peer) frame(most uint64) (body []byte, flags byte, err error) {
	if flags, err = p.reader.ReadByte(); err != nil {
		return nil, 0, err
	}
	var header [8]byte
	length := header[7:]
	if flags&flagLong != 0 {
		length = header[:]
	}
	if _, err = io.ReadFull(p.reader, length); err != nil {
		return nil, 0, err
	}
	size := binary.BigEndian.Uint64(header[:])
	if size > most {
		return nil, 0, fmt.Errorf("a frame of %d bytes, more than %d", size, most)
	}
	if size <= directBytes {
		body = make([]byte, size)
		_, err = io.ReadFull(p.reader, body)
		return body, flags, err
	}
	var read bytes.Buffer
	_, err = io.CopyN(&read, p.reader, int64(size))
	return read.Bytes(), flags, err
}
