// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
	"kvtax/kvindex/cmd/kvindexd/feed"
	"kvtax/kvindex/cmd/kvindexd/fleet"
)

const blockTokens = 4

func newFleet(t testing.TB) *fleet.Fleet {
	t.Helper()
	f, err := fleet.New(fleet.Config{
		Instances: []fleet.InstanceConfig{{Name: `a "quoted" one`, Source: feed.Source{}}, {Name: "b"}},
		MaxBlocks: 1000, MemoBytes: 1 << 20, Seeds: []string{"0"},
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range f.Instances() {
		one.Untouched()
		one.Connected()
	}
	return f
}

// store makes an instance hold the blocks of ids, and returns their hashes.
func store(to *fleet.Instance, ids []uint32, extra blockhash.Extra) [][]byte {
	h := blockhash.New(blockhash.SHA256)
	parent := h.Seed("0")
	var hashes [][]byte
	for start := 0; start+blockTokens <= len(ids); start += blockTokens {
		end := start + blockTokens
		parent = h.Block(&parent, ids[start:end], extra.Keys(blockhash.Placed, start, end))
		hashes = append(hashes, slices.Clone(parent.Bytes()))
	}
	b := msgp.AppendNil(msgp.AppendArrayHeader(nil, 2))
	b = msgp.AppendArrayHeader(msgp.AppendArrayHeader(b, 1), 9)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "BlockStored"), uint32(len(hashes)))
	for _, hash := range hashes {
		b = msgp.AppendBytes(b, hash)
	}
	b = msgp.AppendArrayHeader(msgp.AppendNil(b), uint32(len(ids)))
	for _, id := range ids {
		b = msgp.AppendUint32(b, id)
	}
	b = msgp.AppendNil(msgp.AppendInt(b, blockTokens))
	b = msgp.AppendString(msgp.AppendString(b, "GPU"), extra.LoRA)
	if extra.LoRA == "" {
		b = msgp.AppendNil(b[:len(b)-1])
	}
	to.Take(to.Position().Next, msgp.AppendNil(b))
	return hashes
}

func ids(n int) []uint32 {
	found := make([]uint32, n)
	for i := range found {
		found[i] = uint32(i * 1000)
	}
	return found
}

func littleEndian(ids []uint32) []byte {
	var found []byte
	for _, id := range ids {
		found = binary.LittleEndian.AppendUint32(found, id)
	}
	return found
}

func ask(t testing.TB, h http.Handler, method, target string, body []byte, header ...string) (int, string) {
	t.Helper()
	r := httptest.NewRequest(method, target, bytes.NewReader(body))
	for n := 0; n < len(header); n += 2 {
		r.Header.Set(header[n], header[n+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

// tokens returns those of each instance in an answer.
func tokens(t testing.TB, answer string) []int {
	t.Helper()
	var found struct {
		Instances []struct {
			Name                        string
			BlockTokens, Blocks, Tokens int
		}
	}
	if err := json.Unmarshal([]byte(answer), &found); err != nil {
		t.Fatal(err, answer)
	}
	var all []int
	for _, one := range found.Instances {
		all = append(all, one.Tokens)
	}
	return all
}

const octets = "application/octet-stream"

func TestEveryFormOfAPromptHasTheSameAnswer(t *testing.T) {
	f := newFleet(t)
	h := New(f, Config{MaxBodyBytes: 1 << 20}).Handler
	prompt := ids(43)
	hashes := store(f.Instances()[1], prompt[:20], blockhash.Extra{})
	store(f.Instances()[0], prompt[:4], blockhash.Extra{})
	want := []int{4, 20}
	array, _ := json.Marshal(prompt)
	spaced := strings.ReplaceAll(" "+string(array)+" \n", ",", " ,\t")
	for form, body := range map[string][]byte{octets: littleEndian(prompt), "application/json": array, "": []byte(spaced)} {
		code, answer := ask(t, h, "POST", "/v1/lookup", body, "Content-Type", form)
		if code != 200 || !slices.Equal(tokens(t, answer), want) {
			t.Errorf("%q: %d %s", form, code, answer)
		}
	}
	var inHex, numbers []string
	for _, hash := range hashes {
		inHex = append(inHex, fmt.Sprintf("%q", hex.EncodeToString(hash)))
		numbers = append(numbers, fmt.Sprint(blockhash.Name(hash)))
	}
	body := fmt.Sprintf(`{"prompts":[{"token_ids":%s},{"block_hashes":[%s]},{"block_hashes":[%s]},{}]}`,
		array, strings.Join(inHex, ","), strings.Join(numbers, ", "))
	code, answer := ask(t, h, "POST", "/v1/lookup", []byte(body))
	var found struct{ Answers []json.RawMessage }
	if err := json.Unmarshal([]byte(answer), &found); code != 200 || err != nil || len(found.Answers) != 4 {
		t.Fatal(code, answer, err)
	}
	for n, one := range found.Answers {
		if n == 3 {
			want = []int{0, 0}
		}
		if !slices.Equal(tokens(t, string(one)), want) {
			t.Errorf("prompt %d: %s", n, one)
		}
	}
}

func TestTheLastTokenIsAlwaysComputed(t *testing.T) {
	f := newFleet(t)
	h := New(f, Config{MaxBodyBytes: 1 << 20}).Handler
	store(f.Instances()[1], ids(40), blockhash.Extra{})
	for n, want := range map[int]int{0: 0, 1: 0, 4: 0, 5: 4, 8: 4, 40: 36, 41: 40} {
		_, answer := ask(t, h, "POST", "/v1/lookup", littleEndian(ids(n)), "Content-Type", octets)
		if got := tokens(t, answer); got[1] != want {
			t.Errorf("%d tokens of %d, not %d", got[1], n, want)
		}
	}
}

func TestAdaptersAndSaltsAreToldApart(t *testing.T) {
	f := newFleet(t)
	h := New(f, Config{MaxBodyBytes: 1 << 20}).Handler
	store(f.Instances()[0], ids(8), blockhash.Extra{})
	store(f.Instances()[0], ids(40), blockhash.Extra{LoRA: "x"})
	for query, want := range map[string]int{"": 8, "?lora=x": 40, "?lora=y": 0, "?model=x": 40, "?model=y": 8, "?cache_salt=s": 0} {
		_, answer := ask(t, h, "POST", "/v1/lookup"+query, littleEndian(ids(41)), "Content-Type", octets)
		if got := tokens(t, answer); got[0] != want {
			t.Errorf("%q: %d tokens, not %d", query, got[0], want)
		}
	}
	body, _ := json.Marshal(map[string]any{"prompts": []any{map[string]any{"token_ids": ids(41), "lora": "x"}}})
	if _, answer := ask(t, h, "POST", "/v1/lookup", body); !strings.Contains(answer, `"tokens":40`) {
		t.Error(answer)
	}
}

func TestWhatCannotBeAnsweredIsRefusedInWords(t *testing.T) {
	h := New(newFleet(t), Config{MaxBodyBytes: 100}).Handler
	for _, one := range []struct {
		method, target, body, kind string
		code                       int
		says                       string
	}{
		{"POST", "/v1/lookup", "123", octets, 400, "each token id takes 4"},
		{"POST", "/v1/lookup", "", "", 400, "is needed"},
		{"POST", "/v1/lookup", "[1,2", "", 400, "cut off"},
		{"POST", "/v1/lookup", "[1,-2]", "", 400, "no token id"},
		{"POST", "/v1/lookup", "[4294967296]", "", 400, "no token id"},
		{"POST", "/v1/lookup", "[01]", "", 400, "no token id"},
		{"POST", "/v1/lookup", "[1.5]", "", 400, "followed by"},
		{"POST", "/v1/lookup", "[1] 2", "", 400, "something follows"},
		{"POST", "/v1/lookup", `{"prompts":[]}`, "", 400, "0 prompts"},
		{"POST", "/v1/lookup", `{"prompts":[{"token_ids":["a"]}]}`, "", 400, "no token id"},
		{"POST", "/v1/lookup", `{"prompts":[{"block_hashes":["zz"]}]}`, "", 400, "no block hash"},
		{"POST", "/v1/lookup", `{"prompts":[{"token_ids":[1],"block_hashes":[1]}]}`, "", 400, "one of them"},
		{"POST", "/v1/lookup", strings.Repeat("x", 101), "", 413, "too large"},
		{"GET", "/v1/lookup", "", "", 405, ""},
		{"GET", "/", "", "", 404, ""},
	} {
		code, answer := ask(t, h, one.method, one.target, []byte(one.body), "Content-Type", one.kind)
		if code != one.code || !strings.Contains(answer, one.says) {
			t.Errorf("%s %s %q: %d %s", one.method, one.target, one.body, code, answer)
		}
	}
}

// TestWhatARequestCostsIsBoundedByItsPrompt: images beyond it are not kept, and those that
// cover it again and again, or have endless names, are refused.
func TestWhatARequestCostsIsBoundedByItsPrompt(t *testing.T) {
	tokens := make(tokenIDs, 100)
	images := func(n int, image imageInput) []imageInput { return slices.Repeat([]imageInput{image}, n) }
	long := strings.Repeat("x", maxTextBytes+1)
	for name, p := range map[string]struct {
		prompt
		kept int // -1: refused
	}{
		"images beyond":          {prompt{TokenIDs: tokens, Images: images(1000, imageInput{"", 99_999_999, 1})}, 0},
		"two that overlap":       {prompt{TokenIDs: tokens, Images: images(2, imageInput{"a", 0, 1 << 62})}, 2},
		"many that overlap":      {prompt{TokenIDs: tokens, Images: images(5, imageInput{"a", 0, 1 << 62})}, -1},
		"as many as tokens":      {prompt{TokenIDs: tokens, Images: images(400, imageInput{"a", 7, 1})}, 400},
		"more than tokens":       {prompt{TokenIDs: tokens, Images: images(401, imageInput{"a", 7, 1})}, -1},
		"one of no tokens":       {prompt{TokenIDs: tokens, Images: images(1, imageInput{"a", 7, 0})}, -1},
		"one before the prompt":  {prompt{TokenIDs: tokens, Images: images(1, imageInput{"a", -1, 5})}, -1},
		"a long identifier":      {prompt{TokenIDs: tokens, Images: images(1, imageInput{long, 0, 1})}, -1},
		"a long adapter":         {prompt{TokenIDs: tokens, LoRA: long}, -1},
		"a long path":            {prompt{TokenIDs: tokens, LoRA: "a", LoRAPath: long}, -1},
		"a salt of any length":   {prompt{TokenIDs: tokens, CacheSalt: long}, 0},
		"images without a token": {prompt{Images: images(1000, imageInput{"a", 0, 1})}, 0},
	} {
		query, err := p.query()
		if err != nil && p.kept >= 0 || err == nil && len(query.Extra.Images) != p.kept {
			t.Errorf("%s: %d images, %v", name, len(query.Extra.Images), err)
		}
	}
}

func TestATokenIsAskedForWhereThereIsOne(t *testing.T) {
	h := New(newFleet(t), Config{MaxBodyBytes: 100, Token: "secret"}).Handler
	for given, want := range map[string]int{"": 401, "Bearer wrong": 401, "secret": 401, "Bearer secret": 200} {
		for _, path := range []string{"/metrics", "/v1/lookup"} {
			method := map[string]string{"/metrics": "GET", "/v1/lookup": "POST"}[path]
			if code, answer := ask(t, h, method, path, []byte("[1]"), "Authorization", given); code != want {
				t.Errorf("%s with %q: %d %s", path, given, code, answer)
			}
		}
	}
	if code, _ := ask(t, h, "GET", "/healthz", nil); code != 200 {
		t.Error("/healthz wants a token")
	}
}

func TestHealthAndMetricsSayWhatThereIs(t *testing.T) {
	f := newFleet(t)
	h := New(f, Config{MaxBodyBytes: 1 << 20}).Handler
	store(f.Instances()[1], ids(40), blockhash.Extra{})
	ask(t, h, "POST", "/v1/lookup", []byte("[1,2,3]"))
	_, health := ask(t, h, "GET", "/healthz", nil)
	for _, want := range []string{`"blocks":10`, `"naming":"sha256"`, `"complete":true`, `"naming":"not told yet"`} {
		if !strings.Contains(health, want) {
			t.Errorf("no %s in %s", want, health)
		}
	}
	_, metrics := ask(t, h, "GET", "/metrics", nil)
	for _, want := range []string{
		"kvindexd_blocks 10\n", "kvindexd_prompts_total 1\n", "kvindexd_prompt_tokens_total 3\n",
		"kvindexd_lookup_seconds_count 1\n", `kvindexd_lookup_seconds_bucket{le="+Inf"} 1` + "\n",
		`kvindexd_instance_blocks{instance="b",medium="GPU"} 10` + "\n",
		`kvindexd_instance_connected{instance="a \"quoted\" one"} 1` + "\n",
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("no %s in %s", want, metrics)
		}
	}
}

// TestHTTP2WithoutTLS: as a gRPC-minded client speaks to a port it knows.
func TestHTTP2WithoutTLS(t *testing.T) {
	served := httptest.NewUnstartedServer(nil)
	served.Config = New(newFleet(t), Config{MaxBodyBytes: 1 << 20})
	served.Start()
	defer served.Close()
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: protocols}}
	answer, err := client.Post(served.URL+"/v1/lookup", octets, bytes.NewReader(littleEndian(ids(50_000))))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	body, _ := io.ReadAll(answer.Body)
	if answer.ProtoMajor != 2 || answer.StatusCode != 200 || len(tokens(t, string(body))) != 2 {
		t.Error(answer.Proto, answer.Status, string(body))
	}
}

// FuzzLookup: whatever the body, there is an answer or an error in JSON, and a list of
// token ids says the same in both forms.
func FuzzLookup(f *testing.F) {
	fl := newFleet(f)
	store(fl.Instances()[0], ids(40), blockhash.Extra{})
	h := New(fl, Config{MaxBodyBytes: 1 << 20}).Handler
	f.Add([]byte("[1,2,3]"))
	f.Add([]byte(`{"prompts":[{"token_ids":[0,1000,2000,3000,4000],"lora":"a","images":[{"id":"x","offset":1,"tokens":9}]}]}`))
	f.Add([]byte(`{"prompts":[{"block_hashes":["00112233445566778899"]}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		code, answer := ask(t, h, "POST", "/v1/lookup", body)
		if code != 200 && code != 400 || !json.Valid([]byte(answer)) {
			t.Fatalf("%d %s", code, answer)
		}
		var list []uint32
		if json.Unmarshal(body, &list) != nil || list == nil {
			return
		}
		if code != 200 {
			t.Fatalf("a list of numbers is refused: %s", answer)
		}
		if _, same := ask(t, h, "POST", "/v1/lookup", littleEndian(list), "Content-Type", octets); same != answer {
			t.Fatalf("%s as JSON, %s as numbers", answer, same)
		}
	})
}

func TestNumbersOfEveryLengthAreRead(t *testing.T) {
	for _, more := range []string{"", "]", ",1234567890", "x", "\xff\xff\xff\xff\xff\xff\xff\xff", "/:0;9"} {
		for number, n := uint64(0), 0; n < 12; n++ {
			digits := fmt.Sprint(number)
			if got, length := leadingNumber([]byte(digits + more)); got != number || length != len(digits) {
				t.Errorf("%q: %d of %d digits", digits+more, got, length)
			}
			number = number*10 + uint64(n%10)
		}
	}
	if _, length := leadingNumber([]byte("-1234567")); length != 0 {
		t.Error("a sign is a digit")
	}
}

func BenchmarkParseIDs(b *testing.B) {
	some := make([]uint32, 33_000)
	for i := range some {
		some[i] = uint32(i*7919) % 150_000
	}
	text, _ := json.Marshal(some)
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		if _, _, err := parseIDs(some[:0], text); err != nil {
			b.Fatal(err)
		}
	}
}
