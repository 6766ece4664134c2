// SPDX-License-Identifier: Apache-2.0

// Package fleet knows which instances hold which blocks, by their KV events.
package fleet

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"kvtax/kvindex"
	"kvtax/kvindex/cmd/kvindexd/blockhash"
	"kvtax/kvindex/cmd/kvindexd/feed"
	"kvtax/kvindex/cmd/kvindexd/names"
)

// Config says of whom a fleet is made, and bounds its memory.
type Config struct {
	Instances []InstanceConfig
	// MaxBlocks is how many different blocks are known at most. Those stored or asked
	// for least recently are forgotten first.
	MaxBlocks int
	// MemoBytes is for the names of the prompts that were asked for.
	MemoBytes int
	// Seeds are what the instances may have as PYTHONHASHSEED, or take instead of it.
	Seeds []string
}

// An InstanceConfig names an instance and where it publishes.
type InstanceConfig struct {
	Name   string
	Source feed.Source
}

// A holder is where a block is: in one medium of one instance, for a KV cache group.
type holder struct {
	instance uint16
	medium   uint8
	group    uint8
}

const (
	// Of one instance.
	maxMedia    = 8
	maxGroups   = 64
	maxAdapters = 1024
)

// A Fleet is all instances and what they hold.
type Fleet struct {
	index     *kvindex.Index[holder]
	memo      *names.Memo
	maxBlocks int
	seeds     []string
	instances []*Instance

	// quiet is held by whoever wants that nothing changes; by events for reading.
	quiet sync.RWMutex
}

// New returns a fleet of which nothing is known yet.
func New(config Config, log *slog.Logger) (*Fleet, error) {
	if n := len(config.Instances); n < 1 || n > 1<<12 {
		return nil, fmt.Errorf("%d instances: 1 to %d are possible", n, 1<<12)
	}
	index, err := kvindex.New[holder](kvindex.Config{
		Capacity: config.MaxBlocks, MaxPodsPerKey: maxMedia * maxGroups * len(config.Instances),
	})
	if err != nil {
		return nil, err
	}
	f := &Fleet{
		index:     index,
		memo:      names.NewMemo(config.MemoBytes),
		maxBlocks: config.MaxBlocks,
		seeds:     config.Seeds,
	}
	for n, instance := range config.Instances {
		if f.Instance(instance.Name) != nil {
			return nil, fmt.Errorf("two instances have the name %q", instance.Name)
		}
		f.instances = append(f.instances, newInstance(f, uint16(n), instance, log))
	}
	index.OnEvict(func(holders []holder) {
		for _, h := range holders {
			f.instances[h.instance].evicted.Store(true)
		}
	})
	return f, nil
}

// Instances returns all of them, in the order of the Config.
func (f *Fleet) Instances() []*Instance { return f.instances }

// Instance returns the one of a name, or nil.
func (f *Fleet) Instance(name string) *Instance {
	for _, instance := range f.instances {
		if instance.Name == name {
			return instance
		}
	}
	return nil
}

// Blocks returns how many different blocks are known.
func (f *Fleet) Blocks() int { return f.index.Len() }

// MaxBlocks returns how many may be known.
func (f *Fleet) MaxBlocks() int { return f.maxBlocks }

// schemeOf returns how an instance names blocks, by its name for a block of so many tokens
// of a prompt that begins with ids. Keys are the extra keys of the first block, as
// published; if there are any, the block is the first. A name may cover several of the
// blocks that are hashed: where groups have blocks of different sizes, as many as the
// smallest has tokens are.
func (f *Fleet) schemeOf(name uint64, ids []uint32, size int, keys blockhash.Keys) (names.HashScheme, bool) {
	for unit := size; unit > 0; unit-- {
		if size%unit > 0 || unit < size && keys != nil {
			continue
		}
		for _, algorithm := range blockhash.Algorithms {
			for _, seed := range f.seeds {
				scheme := names.HashScheme{Algorithm: algorithm, Seed: seed, BlockTokens: unit}
				if gives(scheme, name, ids, size, keys) || keys != nil && gives(scheme, name, ids, size, keys.Tagged()) {
					return scheme, true
				}
			}
		}
	}
	return names.HashScheme{}, false
}

// gives reports whether a scheme gives the name for one of the blocks of ids.
func gives(scheme names.HashScheme, name uint64, ids []uint32, size int, keys blockhash.Keys) bool {
	h := blockhash.New(scheme.Algorithm)
	hash := h.Seed(scheme.Seed)
	for end := scheme.BlockTokens; end <= len(ids); end += scheme.BlockTokens {
		hash = h.Block(&hash, ids[end-scheme.BlockTokens:end], keys)
		if end%size == 0 && hash.Name() == name {
			return true
		}
	}
	return false
}

// A set is a few things in the order in which they came, at most so many. It is read
// without a lock.
type set[T comparable] struct {
	most int
	mu   sync.Mutex
	has  atomic.Pointer[[]T]
}

// all returns what there is. It must not be changed.
func (s *set[T]) all() []T {
	if has := s.has.Load(); has != nil {
		return *has
	}
	return nil
}

// add returns the place of a thing that is there from now on; -1 if there is no room.
func (s *set[T]) add(value T) int {
	if n := slices.Index(s.all(), value); n >= 0 {
		return n
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := slices.Index(s.all(), value)
	if n < 0 && len(s.all()) < s.most {
		n = len(s.all())
		more := append(slices.Clone(s.all()), value)
		s.has.Store(&more)
	}
	return n
}

// A snapshot is a magic line, a gob of snapshotHeader with its length before it, one
// record for each block (its name, the number of its holders, and these), a record of
// no holders, and the CRC-32 of all that.
const snapshotMagic = "kvindexd snapshot 3\n"

type snapshotHeader struct {
	Instances []snapshotInstance
}

type snapshotInstance struct {
	Name     string
	Source   feed.Source
	State    state
	Media    []string
	Adapters []string
}

// Save writes a snapshot to a file, in one piece or not at all. Events wait meanwhile.
func (f *Fleet) Save(path string) error {
	temporary, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(temporary.Name())
	defer temporary.Close()
	if err := f.write(temporary); err != nil {
		return err
	}
	if err := temporary.Sync(); err != nil {
		return err
	}
	return os.Rename(temporary.Name(), path)
}

func (f *Fleet) write(file io.Writer) error {
	f.quiet.Lock()
	defer f.quiet.Unlock()
	sum := crc32.NewIEEE()
	out := bufio.NewWriterSize(io.MultiWriter(file, sum), 1<<20)
	out.WriteString(snapshotMagic)
	if err := f.writeHeader(out); err != nil {
		return err
	}
	var record []byte
	for name, holders := range f.index.All() {
		record = binary.LittleEndian.AppendUint64(record[:0], name)
		record = binary.LittleEndian.AppendUint16(record, uint16(len(holders)))
		for _, h := range holders {
			record = append(binary.LittleEndian.AppendUint16(record, h.instance), h.medium, h.group)
		}
		out.Write(record)
	}
	out.Write(make([]byte, 10))
	if err := out.Flush(); err != nil {
		return err
	}
	return binary.Write(file, binary.LittleEndian, sum.Sum32())
}

func (f *Fleet) writeHeader(out *bufio.Writer) error {
	var header snapshotHeader
	for _, instance := range f.instances {
		instance.mu.Lock()
		defer instance.mu.Unlock()
		state := instance.state
		state.Complete = instance.complete()
		header.Instances = append(header.Instances, snapshotInstance{
			instance.Name, instance.Source, state, instance.media.all(), instance.adapters.all(),
		})
	}
	var encoded bytes.Buffer
	if err := gob.NewEncoder(&encoded).Encode(&header); err != nil {
		return err
	}
	binary.Write(out, binary.LittleEndian, uint32(encoded.Len()))
	_, err := encoded.WriteTo(out)
	return err
}

var errTorn = errors.New("it is torn or changed")

// Load takes over what a snapshot says of the instances that are still of the fleet. It
// counts only once their feeds have found the publishers unchanged. The fleet must be as
// New made it; if there is an error, it is no longer of use.
func (f *Fleet) Load(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	body, ok := bytes.CutPrefix(data, []byte(snapshotMagic))
	if !ok || len(body) < 8 {
		return fmt.Errorf("%s is no snapshot of this version", path)
	}
	sum := len(data) - 4
	if crc32.ChecksumIEEE(data[:sum]) != binary.LittleEndian.Uint32(data[sum:]) {
		return fmt.Errorf("%s: %w", path, errTorn)
	}
	size := int(binary.LittleEndian.Uint32(body))
	body = body[4 : len(body)-4]
	if size > len(body) {
		return fmt.Errorf("%s: %w", path, errTorn)
	}
	var header snapshotHeader
	if err := gob.NewDecoder(bytes.NewReader(body[:size])).Decode(&header); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := f.readBlocks(body[size:], f.readInstances(header.Instances)); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// readInstances returns which instance each one of the snapshot is, or nil.
func (f *Fleet) readInstances(saved []snapshotInstance) []*Instance {
	instances := make([]*Instance, len(saved))
	for n, entry := range saved {
		instance := f.Instance(entry.Name)
		if instance == nil || instance.Source != entry.Source || entry.State.Naming == HashUnrecognized {
			continue // of a foreign one nothing was kept, and the seeds may be others now
		}
		instances[n] = instance
		refcounts := instance.state.Refcounts
		instance.state = entry.State
		if instance.state.Refcounts == nil { // gob leaves out what is empty
			instance.state.Refcounts = refcounts
		}
		if len(entry.Media) > 0 {
			instance.media.has.Store(&entry.Media)
		}
		instance.adapters.has.Store(&entry.Adapters)
	}
	return instances
}

func (f *Fleet) readBlocks(records []byte, instances []*Instance) error {
	var holders []holder
	for len(records) >= 10 {
		name := binary.LittleEndian.Uint64(records)
		count := int(binary.LittleEndian.Uint16(records[8:]))
		records = records[10:]
		if count == 0 {
			return nil
		}
		if len(records) < 4*count {
			return errTorn
		}
		holders = holders[:0]
		for ; count > 0; count-- {
			n, medium, group := int(binary.LittleEndian.Uint16(records)), records[2], records[3]
			if n >= len(instances) {
				return errTorn
			}
			if instance := instances[n]; instance != nil {
				holders = append(holders, holder{instance.number, medium, group})
				if medium > 0 {
					instance.tiered.Store(true)
				}
			}
			records = records[4:]
		}
		f.index.Add([]uint64{name}, holders...)
	}
	return errTorn
}
