// SPDX-License-Identifier: Apache-2.0

// Package server answers over HTTP which instances hold the leading blocks of a prompt.
package server

import (
	"crypto/subtle"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"sync"
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
	for _, one := range f.Instances() {
		name, _ := json.Marshal(one.Name)
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
	one := s.workers.Get().(*worker)
	defer s.workers.Put(one)
	queries, batch, err := one.queries(r, s.config.MaxBodyBytes)
	if err != nil {
		s.refuse(w, statusOf(err), err)
		return
	}
	one.answer = one.answer[:0]
	if batch {
		one.answer = append(one.answer, `{"answers":[`...)
	}
	for n := range queries {
		if n > 0 {
			one.answer = append(one.answer, ',')
		}
		one.answer = s.appendAnswer(one.answer, one.reader.Lookup(&queries[n]))
		s.metrics.prompts.Add(1)
		s.metrics.tokens.Add(uint64(len(queries[n].IDs)))
	}
	if batch {
		one.answer = append(one.answer, "]}"...)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(one.answer))) // not in chunks
	w.Write(one.answer)
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
	var found []fleet.Status
	for _, one := range s.fleet.Instances() {
		found = append(found, one.Status())
	}
	return found
}
