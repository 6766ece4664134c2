// SPDX-License-Identifier: Apache-2.0

package results

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func example() *File {
	return &File{
		Provenance: Provenance{Modules: map[string]string{"m": "v1"}, Rounds: 3},
		Planned:    2,
		Trials: []Trial{
			{Kind: KindBurst, Design: "kvindex", Args: []string{"-design"}, Burst: &Burst{Readers: 64}},
			{Kind: KindWalk, Design: "merged", Args: []string{}, Failure: "panic\n|"},
		},
	}
}

func TestAFileComesBackAsItWasWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "results.json")
	for range 2 { // the second time there is one to be replaced
		if err := example().Write(path); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, example()) {
		t.Errorf("got %+v", got)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestATornFileIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "results.json")
	if err := example().Write(path); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{0, 1, len(whole) / 2, len(whole) - 3} {
		if err := os.WriteFile(path, whole[:size], 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(path); err == nil || !strings.Contains(err.Error(), "kvbench run") {
			t.Errorf("%d of %d bytes: %v", size, len(whole), err)
		}
	}
}

func TestOnlyOneRunHoldsTheLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "results.json")
	unlock, err := Lock(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(path); err == nil || !strings.Contains(err.Error(), "another run") {
		t.Errorf("the second: %v", err)
	}
	unlock()
	again, err := Lock(path)
	if err != nil {
		t.Fatal(err)
	}
	again()
	if left, _ := filepath.Glob(path + "*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
