// SPDX-License-Identifier: Apache-2.0

package blockhash

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"testing"
)

// vectors is testdata/vectors.json, made by vectors.py from vLLM's own functions.
type vectors struct {
	BlockTokens int `json:"block_tokens"`
	Prompts     []struct {
		IDs      []uint32
		LoRA     string
		LoRAPath string `json:"lora_path"`
		Salt     string
		Images   []Image
	}
	Made map[string][]struct {
		Algorithm Algorithm
		Seed      string
		NoneHash  string `json:"none_hash"`
		Made      []struct {
			Prompt int
			Hashes []string
		}
	}
}

func readVectors(t testing.TB) *vectors {
	t.Helper()
	data, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	found := new(vectors)
	if err := json.Unmarshal(data, found); err != nil {
		t.Fatal(err)
	}
	return found
}

// styleOf is what the releases were read to do.
var styleOf = map[string]Style{
	"0.18.1": Bare, "0.22.1": Placed, "0.25.1": Placed, "0.28.0": Placed,
	"0.30.0": Placed, "0.32.0": Tagged, "0.33.0": Tagged,
}

func TestHashesAreThoseOfEveryRelease(t *testing.T) {
	v := readVectors(t)
	if len(v.Made) != len(styleOf) {
		t.Fatalf("vectors of %d releases", len(v.Made))
	}
	for release, sets := range v.Made {
		for _, set := range sets {
			h := New(set.Algorithm)
			seed := h.Seed(set.Seed)
			if got := hex.EncodeToString(seed.Bytes()); got != set.NoneHash {
				t.Errorf("%s %s: seed %q is %s, not %s", release, set.Algorithm, set.Seed, got, set.NoneHash)
			}
			for _, made := range set.Made {
				prompt := v.Prompts[made.Prompt]
				extra := Extra{prompt.LoRA, prompt.LoRAPath, prompt.Salt, prompt.Images}
				if !slices.ContainsFunc(extra.Styles(), func(style Style) bool {
					return slices.Equal(chain(h, seed, prompt.IDs, &extra, style, v.BlockTokens), made.Hashes)
				}) {
					t.Errorf("%s %s: prompt %d has other hashes in every style", release, set.Algorithm, made.Prompt)
				}
				got := chain(h, seed, prompt.IDs, &extra, styleOf[release], v.BlockTokens)
				if !slices.Equal(got, made.Hashes) {
					t.Errorf("%s %s: prompt %d has hashes %v, not %v", release, set.Algorithm, made.Prompt, got, made.Hashes)
				}
			}
		}
	}
}

func chain(h *Hasher, parent Hash, ids []uint32, extra *Extra, style Style, size int) []string {
	var hashes []string
	for start := 0; start+size <= len(ids); start += size {
		parent = h.Block(&parent, ids[start:start+size], extra.Keys(style, start, start+size))
		hashes = append(hashes, hex.EncodeToString(parent.Bytes()))
	}
	return hashes
}

func TestANameIsWhatVLLMPublishesAsANumber(t *testing.T) {
	h := New(SHA256)
	hash := h.Seed("0")
	// maybe_convert_block_hash: int.from_bytes(hash, "big") & (2**64 - 1)
	if want := binary.BigEndian.Uint64(hash.Bytes()[24:]); hash.Name() != want {
		t.Errorf("the name is %x, not %x", hash.Name(), want)
	}
	if Name([]byte("short")) != 0 {
		t.Error("seven bytes have a name")
	}
}

func BenchmarkBlock(b *testing.B) {
	for _, algorithm := range Algorithms {
		for _, tokens := range []int{16, 128} {
			b.Run(fmt.Sprintf("%s/%d", algorithm, tokens), func(b *testing.B) {
				h := New(algorithm)
				parent := h.Seed("0")
				ids := make([]uint32, tokens)
				for i := range ids {
					ids[i] = uint32(i * 997)
				}
				b.ReportAllocs()
				for b.Loop() {
					parent = h.Block(&parent, ids, nil)
				}
			})
		}
	}
}
