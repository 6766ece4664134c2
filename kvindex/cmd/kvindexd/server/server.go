// SPDX-License-Identifier: Apache-2.0

// Package server answers over HTTP which instances hold the leading blocks of a prompt.
package server

import (
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
	"kvtax/kvindex/cmd/kvindexd/fleet"
)

// Config bounds what is answered, and to whom.
type Config struct {
	MaxBodyBytes int64
	// Token must be given by who asks, except for /healthz; empty: nobody needs one.
	Token string
}

const (
	// maxPrompts bounds a batch.
	maxPrompts     = 1024
	headerTimeout  = 5 * time.Second
	requestTimeout = 30 * time.Second
	idleTimeout    = 2 * time.Minute
)

// A Server answers lookups in a fleet.
type Server struct {
	fleet   *fleet.Fleet
	config  Config
	workers sync.Pool
	metrics metrics
	names   [][]byte // of the instances, as JSON has them
}

// New returns a server that is to be given connections: HTTP/1.1, and HTTP/2 with and
// without TLS.
func New(f *fleet.Fleet, config Config) *http.Server {
	s := &Server{fleet: f, config: config}
	for _, instance := range f.Instances() {
		name, _ := json.Marshal(instance.Name)
		s.names = append(s.names, name)
	}
	s.workers.New = func() any { return &worker{reader: f.NewReader()} }
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           s.handler(),
		Protocols:         protocols,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       requestTimeout,
		WriteTimeout:      requestTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    1 << 16,
	}
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", s.health)
	mux.Handle("GET /metrics", s.guarded(s.writeMetrics))
	mux.Handle("POST /v1/lookup", s.guarded(s.lookup))
	return mux
}

// guarded asks for the token first.
func (s *Server) guarded(handle http.HandlerFunc) http.Handler {
	want := []byte("Bearer " + s.config.Token)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given := []byte(r.Header.Get("Authorization"))
		if s.config.Token != "" && subtle.ConstantTimeCompare(given, want) != 1 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			s.refuse(w, http.StatusUnauthorized, errors.New("a token is needed: Authorization: Bearer TOKEN"))
			return
		}
		handle(w, r)
	})
}

// A worker is what one lookup at a time needs.
type worker struct {
	reader *fleet.Reader
	memory []uint32 // a body, and the token ids that it is
	ids    []uint32
	answer []byte
}

func (s *Server) lookup(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	worker := s.workers.Get().(*worker)
	defer s.workers.Put(worker)
	queries, batch, err := worker.queries(r, s.config.MaxBodyBytes)
	if err != nil {
		s.refuse(w, statusOf(err), err)
		return
	}
	worker.answer = worker.answer[:0]
	if batch {
		worker.answer = append(worker.answer, `{"answers":[`...)
	}
	for n := range queries {
		if n > 0 {
			worker.answer = append(worker.answer, ',')
		}
		worker.answer = s.appendAnswer(worker.answer, worker.reader.Lookup(&queries[n]))
		s.metrics.prompts.Add(1)
		s.metrics.tokens.Add(uint64(len(queries[n].IDs)))
	}
	if batch {
		worker.answer = append(worker.answer, "]}"...)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(worker.answer))) // not in chunks
	w.Write(worker.answer)
	s.metrics.observe(time.Since(began))
}

func statusOf(err error) int {
	if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
		return http.StatusRequestEntityTooLarge
	}
	return http.StatusBadRequest
}

func (s *Server) refuse(w http.ResponseWriter, status int, err error) {
	s.metrics.refused.Add(1)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(map[string]string{"error": err.Error()})
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(struct {
		Blocks    int            `json:"blocks"`
		MaxBlocks int            `json:"max_blocks"`
		Instances []fleet.Status `json:"instances"`
	}{s.fleet.Blocks(), s.fleet.MaxBlocks(), s.statuses()})
}

func (s *Server) statuses() []fleet.Status {
	var statuses []fleet.Status
	for _, instance := range s.fleet.Instances() {
		statuses = append(statuses, instance.Status())
	}
	return statuses
}

// metrics are what requests pay for; the rest is read when somebody asks.
type metrics struct {
	prompts atomic.Uint64
	tokens  atomic.Uint64
	refused atomic.Uint64
	nanos   atomic.Uint64
	within  [len(bucketsUs) + 1]atomic.Uint64
}

// bucketsUs are upper ends, in microseconds.
var bucketsUs = [...]int64{10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 100_000}

// observe notes the time from the start of a request's handler to its answer's last byte.
func (m *metrics) observe(took time.Duration) {
	m.nanos.Add(uint64(took))
	n := 0
	for n < len(bucketsUs) && took.Microseconds() >= bucketsUs[n] {
		n++
	}
	m.within[n].Add(1)
}

func (s *Server) writeMetrics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	m := &s.metrics
	counter := func(name, what string, value uint64) {
		fmt.Fprintf(w, "# HELP kvindexd_%s %s\n# TYPE kvindexd_%s counter\nkvindexd_%s %d\n", name, what, name, name, value)
	}
	counter("prompts_total", "Prompts looked up.", m.prompts.Load())
	counter("prompt_tokens_total", "Token ids of these prompts.", m.tokens.Load())
	counter("refused_total", "Requests refused.", m.refused.Load())
	m.writeTimes(w)
	fmt.Fprintf(w, "# HELP kvindexd_blocks Different blocks that are known.\n# TYPE kvindexd_blocks gauge\nkvindexd_blocks %d\n", s.fleet.Blocks())
	fmt.Fprintf(w, "# HELP kvindexd_max_blocks How many may be.\n# TYPE kvindexd_max_blocks gauge\nkvindexd_max_blocks %d\n", s.fleet.MaxBlocks())
	writeInstances(w, s.statuses())
}

func (m *metrics) writeTimes(w io.Writer) {
	const name = "kvindexd_lookup_seconds"
	fmt.Fprintf(w, "# HELP %s Time of a request, in its handler.\n# TYPE %s histogram\n", name, name)
	count := uint64(0)
	for n := range m.within {
		count += m.within[n].Load()
		end := "+Inf"
		if n < len(bucketsUs) {
			end = strconv.FormatFloat(float64(bucketsUs[n])/1e6, 'f', -1, 64)
		}
		fmt.Fprintf(w, "%s_bucket{le=%q} %d\n", name, end, count)
	}
	fmt.Fprintf(w, "%s_sum %g\n%s_count %d\n", name, float64(m.nanos.Load())/1e9, name, count)
}

func writeInstances(w io.Writer, statuses []fleet.Status) {
	for _, metric := range []struct {
		name, kind, what string
		value            func(*fleet.Status) any
	}{
		{"connected", "gauge", "1 if its events arrive.", func(s *fleet.Status) any { return number(s.Connected) }},
		{"complete", "gauge", "1 if it holds no more than is said.", func(s *fleet.Status) any { return number(s.Complete) }},
		{"nameable", "gauge", "1 if its blocks can be named from token ids.", func(s *fleet.Status) any { return number(s.BlockTokens > 0) }},
		{"batches_total", "counter", "Batches of events taken.", func(s *fleet.Status) any { return s.Batches }},
		{"events_total", "counter", "Events taken.", func(s *fleet.Status) any { return s.Events }},
		{"gaps_total", "counter", "Gaps in the sequence of batches.", func(s *fleet.Status) any { return s.Gaps }},
		{"missed_batches_total", "counter", "Batches that did not come by themselves.", func(s *fleet.Status) any { return s.Missed }},
		{"dropped_total", "counter", "Times that all its blocks were forgotten.", func(s *fleet.Status) any { return s.Dropped }},
		{"skipped_blocks_total", "counter", "Blocks that were not kept.", func(s *fleet.Status) any { return s.Skipped }},
		{"unknown_events_total", "counter", "Events of unknown kinds.", func(s *fleet.Status) any { return s.Unknown }},
	} {
		name := "kvindexd_instance_" + metric.name
		fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s %s\n", name, metric.what, name, metric.kind)
		for n := range statuses {
			fmt.Fprintf(w, "%s{instance=%q} %d\n", name, statuses[n].Name, metric.value(&statuses[n]))
		}
	}
	const held = "kvindexd_instance_blocks"
	fmt.Fprintf(w, "# HELP %s Different blocks that it holds.\n# TYPE %s gauge\n", held, held)
	for n := range statuses {
		for medium, blocks := range statuses[n].Blocks {
			fmt.Fprintf(w, "%s{instance=%q,medium=%q} %d\n", held, statuses[n].Name, medium, blocks)
		}
	}
}

func number(yes bool) int {
	if yes {
		return 1
	}
	return 0
}

// A prompt is what a JSON body asks for.
type prompt struct {
	TokenIDs    tokenIDs     `json:"token_ids"`
	BlockHashes []hashName   `json:"block_hashes"`
	Model       string       `json:"model"`
	LoRA        string       `json:"lora"`
	LoRAPath    string       `json:"lora_path"`
	CacheSalt   string       `json:"cache_salt"`
	Images      []imageInput `json:"images"`
}

type imageInput struct {
	ID     string `json:"id"`
	Offset int    `json:"offset"`
	Tokens int    `json:"tokens"`
}

// queries reads what a request asks for, and whether it is a batch. One prompt is its
// token ids alone, as a JSON array or as little-endian numbers of four bytes.
func (w *worker) queries(r *http.Request, maxBytes int64) (queries []fleet.Query, batch bool, err error) {
	body, err := w.read(http.MaxBytesReader(nil, r.Body, maxBytes))
	if err != nil {
		return nil, false, err
	}
	if kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind == "application/octet-stream" {
		if len(body)%4 != 0 {
			return nil, false, fmt.Errorf("a body of %d bytes: each token id takes 4", len(body))
		}
		ids := w.memory[:len(body)/4]
		toNative(ids)
		query, err := queryOf(ids, r.URL.Query())
		return []fleet.Query{query}, false, err
	}
	if rest := skipBlanks(body); len(rest) > 0 && rest[0] == '[' {
		w.ids, rest, err = parseIDs(w.ids[:0], rest)
		if err == nil && len(skipBlanks(rest)) > 0 {
			err = errors.New("something follows the array of token ids")
		}
		if err != nil {
			return nil, false, err
		}
		query, err := queryOf(w.ids, r.URL.Query())
		return []fleet.Query{query}, false, err
	}
	queries, err = readBatch(body)
	return queries, true, err
}

// read returns the body, in w's memory.
func (w *worker) read(body io.Reader) ([]byte, error) {
	const room = 1 << 10
	filled := 0
	for {
		if len(w.memory) < filled/4+room {
			w.memory = append(w.memory, make([]uint32, max(room, len(w.memory)))...)
		}
		n, err := body.Read(bytesOf(w.memory)[filled:])
		filled += n
		if err == io.EOF {
			return bytesOf(w.memory)[:filled], nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// bytesOf returns the memory of ids.
func bytesOf(ids []uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(ids))), 4*len(ids))
}

// toNative makes numbers of what was read as little-endian bytes: nothing to do on most
// machines.
func toNative(ids []uint32) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) == 1 {
		return
	}
	for i, id := range ids {
		ids[i] = binary.LittleEndian.Uint32(binary.NativeEndian.AppendUint32(nil, id))
	}
}

func queryOf(ids []uint32, params url.Values) (fleet.Query, error) {
	p := prompt{
		TokenIDs: ids, Model: params.Get("model"),
		LoRA: params.Get("lora"), LoRAPath: params.Get("lora_path"), CacheSalt: params.Get("cache_salt"),
	}
	return p.query()
}

func readBatch(body []byte) ([]fleet.Query, error) {
	var request struct {
		Prompts []prompt `json:"prompts"`
	}
	if err := json.Unmarshal(body, &request); err != nil {
		return nil, fmt.Errorf(`{"prompts": [...]}, or an array of token ids, is needed: %w`, err)
	}
	if n := len(request.Prompts); n < 1 || n > maxPrompts {
		return nil, fmt.Errorf("%d prompts: 1 to %d are possible", n, maxPrompts)
	}
	var queries []fleet.Query
	for _, prompt := range request.Prompts {
		if len(prompt.TokenIDs) > 0 && len(prompt.BlockHashes) > 0 {
			return nil, errors.New("a prompt with token_ids and block_hashes: one of them is needed")
		}
		query, err := prompt.query()
		if err != nil {
			return nil, err
		}
		queries = append(queries, query)
	}
	return queries, nil
}

const (
	// maxTextBytes bounds what is hashed for each block.
	maxTextBytes = 1024
	// maxCover is how often images may cover a prompt: those of a video and its sound do
	// so twice.
	maxCover = 4
)

func (p *prompt) query() (fleet.Query, error) {
	q := fleet.Query{
		IDs:   p.TokenIDs,
		Model: p.Model,
		Extra: blockhash.Extra{LoRA: p.LoRA, LoRAPath: p.LoRAPath, Salt: p.CacheSalt},
	}
	for _, hash := range p.BlockHashes {
		q.Names = append(q.Names, uint64(hash))
	}
	if max(len(p.LoRA), len(p.LoRAPath)) > maxTextBytes {
		return q, fmt.Errorf("a lora or lora_path of more than %d bytes", maxTextBytes)
	}
	covered := 0
	for n, image := range p.Images {
		if image.Offset < 0 || image.Tokens < 1 || len(image.ID) > maxTextBytes {
			return q, fmt.Errorf("images[%d]: an offset of 0 or more, 1 token or more, and an id of up to %d bytes are needed", n, maxTextBytes)
		}
		image.Tokens = min(image.Tokens, len(p.TokenIDs)-image.Offset)
		if image.Tokens < 1 {
			continue // in none of its blocks
		}
		covered += image.Tokens
		q.Extra.Images = append(q.Extra.Images, blockhash.Image(image))
	}
	if covered > maxCover*len(p.TokenIDs) {
		return q, fmt.Errorf("the images cover %d tokens of a prompt of %d: up to %d times is possible", covered, len(p.TokenIDs), maxCover)
	}
	slices.SortStableFunc(q.Extra.Images, func(a, b blockhash.Image) int { return a.Offset - b.Offset })
	return q, nil
}

// A hashName is a block's name: from its hash in hex, or from the number that vLLM makes
// of its last 8 bytes.
type hashName uint64

func (h *hashName) UnmarshalJSON(text []byte) error {
	if len(text) > 0 && text[0] != '"' {
		return json.Unmarshal(text, (*uint64)(h))
	}
	var digits string
	if err := json.Unmarshal(text, &digits); err != nil {
		return err
	}
	hash, err := hex.DecodeString(digits)
	if err != nil || len(hash) < 8 {
		return fmt.Errorf("%.80q is no block hash in hex", digits)
	}
	*h = hashName(blockhash.Name(hash))
	return nil
}

// tokenIDs is read in a tenth of the time that encoding/json takes for a []uint32.
type tokenIDs []uint32

func (t *tokenIDs) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	ids, _, err := parseIDs(nil, text)
	*t = ids
	return err
}

// parseIDs appends the numbers of the JSON array that text begins with, and returns what
// is after it.
func parseIDs(ids []uint32, text []byte) ([]uint32, []byte, error) {
	if len(text) == 0 || text[0] != '[' {
		return ids, text, errors.New("no array of token ids")
	}
	at := blanks(text, 1)
	if at < len(text) && text[at] == ']' {
		return ids, text[at+1:], nil
	}
	for {
		first := at
		id, digits := leadingNumber(text[at:])
		if at += digits; at == first || id > math.MaxUint32 || at > first+1 && text[first] == '0' {
			return ids, text, fmt.Errorf("no token id: %.20q", text[first:])
		}
		ids = append(ids, uint32(id))
		if at = blanks(text, at); at == len(text) {
			return ids, text, errors.New("the array of token ids is cut off")
		}
		switch text[at] {
		case ',':
			at = blanks(text, at+1)
		case ']':
			return ids, text[at+1:], nil
		default:
			return ids, text, fmt.Errorf("token id %d is followed by %q", len(ids)-1, text[at])
		}
	}
}

// leadingNumber returns the number that text begins with, and how many digits it has: 11
// for all that are longer. Up to 7 are read at once, as each loop that ends after another
// number of turns costs more than all of that.
func leadingNumber(text []byte) (number uint64, digits int) {
	if len(text) >= 8 {
		// A byte is a digit if it is below 10 without its '0'.
		eight := binary.LittleEndian.Uint64(text) ^ 0x3030303030303030
		others := (eight + 0x7676767676767676 | eight) & 0x8080808080808080
		if others != 0 {
			digits = bits.TrailingZeros64(others) / 8
			eight <<= 64 - 8*digits // zeros before them, to make it eight digits
			eight = eight * 2561 >> 8 & 0x00ff00ff00ff00ff
			eight = eight * 6553601 >> 16 & 0x0000ffff0000ffff
			return eight * 42949672960001 >> 32, digits
		}
	}
	for digits < len(text) && digits < 11 && text[digits]-'0' <= 9 {
		number = 10*number + uint64(text[digits]-'0')
		digits++
	}
	return number, digits
}

// blanks returns where the blanks of text end that begin at a place.
func blanks(text []byte, at int) int {
	for at < len(text) && (text[at] == ' ' || text[at] == '\n' || text[at] == '\t' || text[at] == '\r') {
		at++
	}
	return at
}

func skipBlanks(text []byte) []byte { return text[blanks(text, 0):] }

// appendAnswer appends what the instances hold of one prompt, as JSON.
func (s *Server) appendAnswer(out []byte, holdings []fleet.Holding) []byte {
	out = append(out, `{"instances":[`...)
	for n := range holdings {
		h := &holdings[n]
		if n > 0 {
			out = append(out, ',')
		}
		out = append(append(out, `{"name":`...), s.names[n]...)
		out = appendNumber(out, `,"block_tokens":`, h.BlockTokens)
		out = appendNumber(out, `,"blocks":`, h.Blocks)
		out = appendNumber(out, `,"tokens":`, h.Blocks*h.BlockTokens)
		if h.Further > 0 {
			out = append(out, `,"medium":`...)
			out = strconv.AppendQuoteToASCII(out, h.MediumName())
			out = appendNumber(out, `,"further_blocks":`, h.Further)
		}
		out = append(out, `,"score":`...)
		out = append(strconv.AppendFloat(out, h.Score(), 'f', -1, 64), '}')
	}
	return append(out, "]}"...)
}

func appendNumber(out []byte, name string, value int) []byte {
	return strconv.AppendInt(append(out, name...), int64(value), 10)
}
