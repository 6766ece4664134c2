// SPDX-License-Identifier: Apache-2.0

package events

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
)

// A message is one of testdata/messages.json, made by messages.py from each release's
// own structs.
type message struct {
	Name    string
	Payload string
	Events  []struct {
		Type        string
		BlockHashes []any    `json:"block_hashes"`
		Parent      any      `json:"parent_block_hash"`
		TokenIDs    []uint32 `json:"token_ids"`
		BlockSize   int      `json:"block_size"`
		Medium      string
		LoRA        string `json:"lora_name"`
		ExtraKeys   []any  `json:"extra_keys"`
		Group       int    `json:"group_idx"`
		Spec        string `json:"kv_cache_spec_kind"`
		Window      int    `json:"kv_cache_spec_sliding_window"`
		Lookahead   []any  `json:"lookahead_token_ids"`
	}
}

func readMessages(t testing.TB) map[string][]message {
	t.Helper()
	data, err := os.ReadFile("testdata/messages.json")
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string][]message)
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	if err := decoder.Decode(&found); err != nil {
		t.Fatal(err)
	}
	return found
}

func payload(t testing.TB, m message) []byte {
	t.Helper()
	found, err := hex.DecodeString(m.Payload)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func name(t testing.TB, hash any) uint64 {
	t.Helper()
	if number, ok := hash.(json.Number); ok {
		var found uint64
		if _, err := fmt.Sscan(number.String(), &found); err != nil {
			t.Fatal(err)
		}
		return found
	}
	raw, err := hex.DecodeString(hash.(string))
	if err != nil {
		t.Fatal(err)
	}
	return blockhash.Name(raw)
}

// asJSON writes byte strings as messages.py does.
func asJSON(value any) string {
	if keys, ok := value.(blockhash.Keys); ok {
		for i, key := range keys {
			if raw, ok := key.([]byte); ok {
				keys[i] = hex.EncodeToString(raw)
			}
		}
	}
	text, _ := json.Marshal(value)
	return string(text)
}

var tags = map[Kind]string{Stored: "BlockStored", Removed: "BlockRemoved", Cleared: "AllBlocksCleared"}

func TestABatchSaysWhatEveryReleaseMeant(t *testing.T) {
	all := readMessages(t)
	if len(all) != 7 {
		t.Fatalf("messages of %d releases", len(all))
	}
	var decoder Decoder
	for release, messages := range all {
		for _, m := range messages {
			t.Run(release+"/"+m.Name, func(t *testing.T) {
				n := 0
				err := decoder.Decode(payload(t, m), func(got *Event) error {
					want := m.Events[n]
					n++
					var names []uint64
					for _, hash := range want.BlockHashes {
						names = append(names, name(t, hash))
					}
					ids, err := got.TokenIDs.Append(nil, got.TokenIDs.Len())
					keys, keysErr := got.FirstKeys()
					var wantKeys any
					if len(want.ExtraKeys) > 0 {
						wantKeys = want.ExtraKeys[0]
					}
					if tags[got.Kind] != want.Type || !slices.Equal(got.Names, names) ||
						err != nil || !slices.Equal(ids, want.TokenIDs) ||
						got.HasParent != (want.Parent != nil) || got.BlockTokens != want.BlockSize ||
						string(got.Medium) != want.Medium || string(got.LoRA) != want.LoRA ||
						keysErr != nil || asJSON(keys) != asJSON(wantKeys) ||
						got.Group != want.Group || string(got.Spec) != want.Spec || got.Window != want.Window ||
						got.Lookahead != (want.Lookahead != nil) {
						t.Errorf("got %+v, want %+v", got, want)
					}
					return nil
				})
				if err != nil || n != len(m.Events) {
					t.Errorf("%d of %d events, then %v", n, len(m.Events), err)
				}
			})
		}
	}
}

func TestWhatIsNoBatchIsRefused(t *testing.T) {
	stored := []byte{0x92, 0xc0, 0x91} // nil for the time, and one event
	for name, batch := range map[string][]byte{
		"nothing":       nil,
		"no msgpack":    {0xc1},
		"no array":      {0x80},
		"too short":     {0x91, 0xc0},
		"half an event": append(stored, 0x92, 0xc0),
		"an id below 0": append(stored, append(append([]byte{0x94}, msgp.AppendString(nil, "BlockStored")...), 0x90, 0xc0, 0x91, 0xff)...),
	} {
		if err := new(Decoder).Decode(batch, func(*Event) error { return nil }); err == nil {
			t.Errorf("%s: taken as a batch", name)
		}
	}
}

// FuzzDecode: whatever comes, it is read or refused, and all that was read is there.
func FuzzDecode(f *testing.F) {
	for _, messages := range readMessages(f) {
		for _, m := range messages {
			f.Add(payload(f, m))
		}
	}
	f.Fuzz(func(t *testing.T, batch []byte) {
		var decoder Decoder
		decoder.Decode(batch, func(e *Event) error {
			if e.Kind == 0 || len(e.Names) > len(batch) || e.TokenIDs.Len() > len(batch) {
				t.Errorf("read %+v from %d bytes", e, len(batch))
			}
			e.TokenIDs.Append(nil, e.TokenIDs.Len())
			e.FirstKeys()
			return nil
		})
	})
}

func BenchmarkDecode(b *testing.B) {
	for _, release := range []string{"0.18.1", "0.33.0"} {
		for _, m := range readMessages(b)[release] {
			if len(m.Events) != 1 {
				continue
			}
			b.Run(release+"/"+m.Name, func(b *testing.B) {
				batch := payload(b, m)
				var decoder Decoder
				b.ReportAllocs()
				for b.Loop() {
					if err := decoder.Decode(batch, func(*Event) error { return nil }); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
