// SPDX-License-Identifier: Apache-2.0

package results

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// Read returns the run of a file.
func Read(path string) (*File, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	file := new(File)
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(file); err != nil {
		return nil, fmt.Errorf("%s is not a whole results file of this kvbench (%w): make it anew with `kvbench run`", path, err)
	}
	return file, nil
}

// Write replaces the file at once, so that whoever reads it sees a whole run. Each
// trial has a line of its own.
func (f *File) Write(path string) error {
	var text bytes.Buffer
	provenance, err := json.MarshalIndent(f.Provenance, "  ", "  ")
	if err != nil {
		return err
	}
	fmt.Fprintf(&text, "{\n  \"provenance\": %s,\n  \"planned\": %d,\n  \"trials\": [", provenance, f.Planned)
	for i, trial := range f.Trials {
		line, err := json.Marshal(trial)
		if err != nil {
			return err
		}
		if i > 0 {
			text.WriteByte(',')
		}
		fmt.Fprintf(&text, "\n    %s", line)
	}
	text.WriteString("\n  ]\n}\n")
	return Replace(path, text.Bytes())
}

// Replace writes a file by way of a temporary one beside it.
func Replace(path string, data []byte) error {
	temp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name()) // fails once it is renamed
	_, err = temp.Write(data)
	err = errors.Join(err, temp.Chmod(0o644), temp.Sync(), temp.Close())
	if err != nil {
		return err
	}
	return os.Rename(temp.Name(), path)
}

// Lock keeps other runs from writing the same file until unlock is called, or the
// process ends.
func Lock(path string) (unlock func(), err error) {
	name := path + ".lock"
	for {
		file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return nil, err
		}
		if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			file.Close()
			return nil, fmt.Errorf("another run is writing %s (it holds %s): wait for it, or choose another -out", path, name)
		}
		if isStill(file, name) {
			return func() {
				os.Remove(name) // before the lock goes, so that nobody can have it yet
				file.Close()
			}, nil
		}
		file.Close() // its last owner removed it while this was waiting to open it
	}
}

// isStill reports whether a name still leads to an open file.
func isStill(file *os.File, name string) bool {
	opened, err := file.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(name)
	return err == nil && os.SameFile(opened, named)
}
