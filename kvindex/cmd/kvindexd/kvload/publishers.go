// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/tinylib/msgp/msgp"
)

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
		one := &publisher{
			events: fmt.Sprintf("ipc://%s/%d", folder, n),
			replay: fmt.Sprintf("ipc://%s/%d.replay", folder, n),
			pub:    zmq4.NewPub(context.Background()),
			router: zmq4.NewRouter(context.Background()),
		}
		p.all = append(p.all, one)
		for i := range prompts {
			if held := prompts[i].held[n]; held > 0 {
				one.batches = append(one.batches, stored(prompts[i].hashes[:held], prompts[i].ids, l.BlockTokens))
			}
		}
		if err := one.pub.Listen(one.events); err != nil {
			return nil, err
		}
		if err := one.router.Listen(one.replay); err != nil {
			return nil, err
		}
		go one.repeat()
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
	for _, one := range p.all {
		one.pub.Close()
		one.router.Close()
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
		asked, err := p.router.Recv()
		if err != nil {
			return
		}
		p.mu.Lock()
		for n := binary.BigEndian.Uint64(asked.Frames[2]); n < uint64(len(p.batches)); n++ {
			p.router.Send(zmq4.NewMsgFrom(asked.Frames[0], nil, nil, binary.BigEndian.AppendUint64(nil, n), p.batches[n]))
		}
		p.router.Send(zmq4.NewMsgFrom(asked.Frames[0], nil, nil, binary.BigEndian.AppendUint64(nil, 1<<64-1), nil))
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
