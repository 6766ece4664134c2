// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

const (
	handshakeTimeout = 5 * time.Second
	maxFrameBytes    = 1 << 28
	maxFrames        = 8
)

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

// A peer is a single ZMTP connection. The library's sockets connect again in silence, and
// who answers then may be another publisher.
type peer struct {
	conn   net.Conn
	reader *bufio.Reader
	zmtp   *zmq4.Conn
}

// dial connects as a socket of a type. The connection is closed when ctx is done.
func dial(ctx context.Context, endpoint Endpoint, kind zmq4.SocketType) (*peer, error) {
	network, address, err := endpoint.split()
	if err != nil {
		return nil, err
	}
	dialer := net.Dialer{Timeout: handshakeTimeout}
	conn, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { conn.Close() })
	p := &peer{conn: conn, reader: bufio.NewReaderSize(conn, 1<<16)}
	conn.SetDeadline(time.Now().Add(handshakeTimeout))
	p.zmtp, err = zmq4.Open(handshaking{conn, p.reader}, null.Security(), kind, nil, false, nil)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("%s: %w", endpoint, err)
	}
	conn.SetDeadline(time.Time{})
	return p, nil
}

// handshaking is the connection with the reader that the peer goes on with.
type handshaking struct {
	net.Conn
	reader io.Reader
}

func (h handshaking) Read(p []byte) (int, error) { return h.reader.Read(p) }

func (p *peer) close() { p.conn.Close() }

func (p *peer) subscribe() error { return p.zmtp.SendMsg(zmq4.NewMsg([]byte{1})) }

func (p *peer) askForReplay(from uint64) error {
	return p.zmtp.SendMsg(zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, from)))
}

// receive returns the next message: the last two frames, whatever is before them. That is
// a topic; in replays an empty frame, and a topic only from vLLM 0.28 on.
func (p *peer) receive() (message, error) {
	var last, before []byte
	for n := 0; ; n++ {
		frame, flags, err := p.frame()
		switch {
		case err != nil:
			return message{}, err
		case flags&flagCommand != 0:
			continue
		case n == maxFrames:
			return message{}, fmt.Errorf("a message of more than %d frames", maxFrames)
		}
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

// frame reads what the library's RecvMsg would, with a bound on its length.
func (p *peer) frame() (body []byte, flags byte, err error) {
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
	if size > maxFrameBytes {
		return nil, 0, fmt.Errorf("a frame of %d bytes, more than %d", size, maxFrameBytes)
	}
	body = make([]byte, size)
	_, err = io.ReadFull(p.reader, body)
	return body, flags, err
}
