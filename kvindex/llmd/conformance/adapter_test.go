// SPDX-License-Identifier: Apache-2.0

// Package kvblock_test is upstream's: its own tests of the in-memory index are laid over
// this folder, and find the adapter under test here.
package kvblock_test

import (
	"testing"

	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	_ "github.com/stretchr/testify/require" // upstream's tests need it

	"github.com/kvtax/kvtax/kvindex/llmd"
)

func newIndexUnderTest(config *kvblock.InMemoryIndexConfig) (kvblock.Index, error) {
	return llmd.New(config)
}

func TestAdapterIsWhatIsTested(t *testing.T) {
	if _, err := newIndexUnderTest(nil); err != nil {
		t.Fatal(err)
	}
}
