// SPDX-License-Identifier: Apache-2.0

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
	"os"
	"path/filepath"

	"kvtax/kvindex/cmd/kvindexd/feed"
)

// A snapshot is a magic line, a gob of snapshotHeader with its length before it, one
// record for each block (its name, the number of its holders, and these), a record of
// no holders, and the CRC-32 of all that.
const snapshotMagic = "kvindexd snapshot 2\n"

type snapshotHeader struct {
	Media     []string
	Adapters  []string
	Instances []snapshotInstance
}

type snapshotInstance struct {
	Name   string
	Source feed.Source
	State  state
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
	header := snapshotHeader{Media: f.media.all(), Adapters: f.adapters.all()}
	for _, instance := range f.instances {
		instance.mu.Lock()
		defer instance.mu.Unlock()
		state := instance.state
		state.Complete = instance.complete()
		header.Instances = append(header.Instances, snapshotInstance{instance.Name, instance.Source, state})
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
	f.media.has.Store(&header.Media)
	f.adapters.has.Store(&header.Adapters)
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
		if entry.State.HashScheme.BlockTokens > 0 {
			f.schemes.add(entry.State.HashScheme)
		}
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
