// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/tinylib/msgp/msgp"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
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
