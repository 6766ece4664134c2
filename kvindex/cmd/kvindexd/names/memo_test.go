// SPDX-License-Identifier: Apache-2.0

package names

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
)

func always(uint64) bool { return true }

// hashed names blocks one by one, as vLLM does.
func hashed(scheme HashScheme, ids []uint32, extra *blockhash.Extra, style blockhash.Style) []uint64 {
	var names []uint64
	h := blockhash.New(scheme.Algorithm)
	parent := h.Seed(scheme.Seed)
	for start := 0; start+scheme.BlockTokens <= len(ids); start += scheme.BlockTokens {
		end := start + scheme.BlockTokens
		parent = h.Block(&parent, ids[start:end], extra.Keys(style, start, end))
		names = append(names, parent.Name())
	}
	return names
}

var schemes = []HashScheme{
	{blockhash.SHA256, "0", 16},
	{blockhash.SHA256, "1", 16},
	{blockhash.SHA256CBOR, "0", 16},
	{blockhash.XXHash, "0", 4},
	{blockhash.SHA256, "0", 4},
}

// TestNamesAreTheHashesWhateverWasAskedBefore: one memo, much too small, for prompts that
// share prefixes, tell images apart, and come in several schemes and styles at once.
func TestNamesAreTheHashesWhateverWasAskedBefore(t *testing.T) {
	memo := NewMemo(40 * SpanBytes)
	var all sync.WaitGroup
	for seed := range uint64(4) {
		all.Go(func() {
			random := rand.New(rand.NewPCG(seed, 1))
			var namers []*Namer
			for _, scheme := range schemes {
				namers = append(namers, NewNamer(memo, scheme))
			}
			for range 500 {
				ids := make([]uint32, random.IntN(600))
				for i := random.IntN(len(ids) + 1); i < len(ids); i++ {
					ids[i] = random.Uint32N(2)
				}
				extra := &blockhash.Extra{}
				if random.IntN(3) == 0 {
					extra.Salt = fmt.Sprint(random.IntN(2))
				}
				if random.IntN(3) == 0 {
					extra.LoRA, extra.LoRAPath = "a", fmt.Sprint(random.IntN(2))
				}
				if random.IntN(2) == 0 {
					extra.Images = images(random)
				}
				style := blockhash.Style(random.IntN(3))
				n := random.IntN(len(schemes))
				got := namers[n].Append([]uint64{7}, ids, extra, style, always)
				if want := append([]uint64{7}, hashed(schemes[n], ids, extra, style)...); !slices.Equal(got, want) {
					t.Errorf("%d ids in scheme %v with %v: wrong names", len(ids), schemes[n], extra)
					return
				}
			}
		})
	}
	all.Wait()
}

// images returns some in the order of their places, which may overlap.
func images(random *rand.Rand) []blockhash.Image {
	var all []blockhash.Image
	for offset := random.IntN(200); offset < 600 && random.IntN(8) > 0; offset += random.IntN(100) {
		all = append(all, blockhash.Image{ID: fmt.Sprint(random.IntN(2)), Offset: offset, Tokens: 1 + random.IntN(80)})
	}
	return all
}

// TestABlockIsNotHeldAgainstAllImages: one image for each block, and one over all of them.
func TestABlockIsNotHeldAgainstAllImages(t *testing.T) {
	const blocks, size = 10_000, 16
	all := []blockhash.Image{{ID: "all", Tokens: blocks * size}}
	for n := range blocks {
		all = append(all, blockhash.Image{ID: "one", Offset: n * size, Tokens: size})
	}
	window := imageWindow{next: all}
	for n := range blocks {
		if got := window.move(n*size, (n+1)*size); len(got) != 2 || got[1].Offset != n*size {
			t.Fatalf("block %d is held against %d images", n, len(got))
		}
	}
}

func TestNobodyHashesWhatNobodyHolds(t *testing.T) {
	scheme := schemes[0]
	ids := make([]uint32, 1000*scheme.BlockTokens)
	want := hashed(scheme, ids, &blockhash.Extra{}, blockhash.Tagged)
	for _, heldBlocks := range []int{0, 5, 8, 100, 993, 1000} {
		held := func(name uint64) bool { return slices.Contains(want[:heldBlocks], name) }
		memo := NewMemo(1 << 20)
		got := NewNamer(memo, scheme).Append(nil, ids, &blockhash.Extra{}, blockhash.Tagged, held)
		if !slices.Equal(got, want[:len(got)]) {
			t.Errorf("%d held: wrong names", heldBlocks)
		}
		if len(got) < heldBlocks || len(got) > heldBlocks+blocksPerSpan {
			t.Errorf("%d held: %d named", heldBlocks, len(got))
		}
	}
}

func BenchmarkAppend(b *testing.B) {
	for _, size := range []int{16, 128} {
		for _, known := range []bool{true, false} {
			b.Run(fmt.Sprintf("33000 ids/blocks of %d/known=%v", size, known), func(b *testing.B) {
				ids := make([]uint32, 33_000)
				for i := range ids {
					ids[i] = rand.Uint32N(150_000)
				}
				memo := NewMemo(16 << 20)
				namer := NewNamer(memo, HashScheme{blockhash.SHA256, "0", size})
				var names []uint64
				b.ReportAllocs()
				for b.Loop() {
					if !known {
						ids[0]++
					}
					names = namer.Append(names[:0], ids, &blockhash.Extra{}, blockhash.Tagged, always)
				}
			})
		}
	}
}
