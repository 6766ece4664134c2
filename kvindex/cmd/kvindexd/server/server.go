// SPDX-License-Identifier: Apache-2.0

// Package server answers over HTTP which instances hold the leading blocks of a prompt.
package server

import (
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

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
