// SPDX-License-Identifier: Apache-2.0

package blockhash

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
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

// TestWhatIsLongIsFramedAsPythonDoes compares with hashes that Python 3.11 has computed:
// sha256(pickle.dumps((sha256(pickle.dumps("0")), (0, 1, 2, 3), keys))).
func TestWhatIsLongIsFramedAsPythonDoes(t *testing.T) {
	images := func(n int) (keys Keys) {
		for i := range n {
			keys = append(keys, Keys{strings.Repeat(fmt.Sprintf("%04d", i), 250), i})
		}
		return keys
	}
	salt := func(n int) string { return strings.Repeat("x", n) }
	for want, keys := range map[string]Keys{
		"5316df782b061cd861b1728ecf5e22098a38d65a16beb4f1ea437726083c77e8": {salt(65_000)},
		"948361f384e77fdba1815c4450aa44c3f6256a9ac28523963edc6918a428ef1e": {salt(65_535)},
		"3db4fcf4341d6e94822438f9a358733d57419a99336223d2bded8d564a470b94": {salt(65_536)},
		"841d23b18bb088ac86ba12cb234b115ded1465ed47cee854df8a703d2416217b": {Keys{tagSalt, salt(70_000)}},
		"5b30595d81fcb9adc979065687ea438a9b990423ee4068d2ce9b6ae919ed715b": images(64),
		"c033d23da9e8042b0c52e072c821d905d143073e3f37e263564d650e90f0bf94": images(130),
		"08cf077b384171643ddd9f600409023abd937b458c26811af0e09f4d9ba38d08": append(images(64), salt(70_000)),
	} {
		h := New(SHA256)
		parent := h.Seed("0")
		hash := h.Block(&parent, []uint32{0, 1, 2, 3}, keys)
		if got := hex.EncodeToString(hash.Bytes()); got != want {
			t.Errorf("%d keys: %s, want %s", len(keys), got, want)
		}
	}
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
