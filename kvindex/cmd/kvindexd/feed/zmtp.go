// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"
)

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
	if _, _, err := net.SplitHostPort(address); !ok || err != nil || strings.Contains(address, "*") {
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
