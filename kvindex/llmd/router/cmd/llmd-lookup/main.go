// SPDX-License-Identifier: Apache-2.0

// Llmd-lookup answers as kvindexd does which vLLM instances hold the leading KV-cache
// blocks of a prompt, but by llm-d's own code: its subscribers, event pool, index, token
// processor and block scorer. It is there to be compared with.
//
//	llmd-lookup -instances instances.json -listen unix:///run/llmd-lookup.sock
package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"mime"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents/engineadapter"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
)

const (
	headerTimeout  = 5 * time.Second
	requestTimeout = 30 * time.Second
	// idleTimeout is kvindexd's: the proxy keeps its connections for a minute.
	idleTimeout = 2 * time.Minute
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// llm-d's level: trace is off, and its arguments are made all the same.
	logger := zap.New(zap.WriteTo(os.Stderr))
	log.SetLogger(logger)
	if err := run(log.IntoContext(ctx, logger), os.Args[1:], os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "llmd-lookup:", err)
		os.Exit(1)
	}
}

// run serves until ctx is done. It writes a line with its address once it listens.
func run(ctx context.Context, arguments []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("llmd-lookup", flag.ContinueOnError)
	flags.SetOutput(stderr)
	file := flags.String("instances", "", "a kvtax.instances/1 `FILE`: name, kv_events, block_tokens of each")
	address := flags.String("listen", "tcp://127.0.0.1:8079", "unix:///PATH or tcp://HOST:PORT, port 0 for a free one")
	seed := flags.String("hash-seed", "", "the seed of llm-d's own block keys; any will do")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	instances, err := readInstances(*file)
	if err != nil {
		return err
	}
	listener, err := listen(*address)
	if err != nil {
		return err
	}
	followed, err := follow(ctx, instances, *seed)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	serving := &http.Server{
		Handler:           handler(followed),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       requestTimeout,
		WriteTimeout:      requestTimeout,
		IdleTimeout:       idleTimeout,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	stopped := context.AfterFunc(ctx, func() { serving.Close() })
	defer stopped()
	fmt.Fprintf(stdout, "%s://%s\n", listener.Addr().Network(), listener.Addr())
	if err := serving.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func listen(address string) (net.Listener, error) {
	network, where, ok := strings.Cut(address, "://")
	if !ok || where == "" || network != "unix" && network != "tcp" {
		return nil, fmt.Errorf("-listen %s: unix:///PATH or tcp://HOST:PORT is needed", address)
	}
	return net.Listen(network, where)
}

const schema = "kvtax.instances/1"

// An instance is one vLLM engine, as a line of instances.json has it.
type instance struct {
	Name        string `json:"name"`
	Events      string `json:"kv_events"`
	BlockTokens int    `json:"block_tokens"`
}

// readInstances reads a file as kvtax_fleet.launch writes it. All instances must have blocks of
// one size, as llm-d's index has.
func readInstances(file string) ([]instance, error) {
	if file == "" {
		return nil, errors.New("-instances FILE is needed")
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var document struct {
		Schema    string
		Instances []instance
	}
	if err := json.Unmarshal(data, &document); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if document.Schema != schema || len(document.Instances) == 0 {
		return nil, fmt.Errorf("%s: its schema is %q with %d instances, %s with at least one is needed",
			file, document.Schema, len(document.Instances), schema)
	}
	for n := range document.Instances {
		instance := &document.Instances[n]
		if instance.BlockTokens == 0 {
			instance.BlockTokens = 16 // what a file may leave out
		}
		if instance.Events == "" {
			return nil, fmt.Errorf("%s: %s has no `kv_events`: start it with --kv-events-config, and say where", file, instance.Name)
		}
		if first := document.Instances[0]; instance.BlockTokens != first.BlockTokens {
			return nil, fmt.Errorf("%s: blocks of %d tokens at %s and of %d at %s: llm-d's index has one size",
				file, first.BlockTokens, first.Name, instance.BlockTokens, instance.Name)
		}
	}
	return document.Instances, nil
}

// maxBodyBytes is kvindexd's default.
const maxBodyBytes = 16 << 20

// A holding is what one instance holds of a prompt: llm-d's score, and that in tokens.
type holding struct {
	Name        string  `json:"name"`
	BlockTokens int     `json:"block_tokens"`
	Tokens      int     `json:"tokens"`
	Score       float64 `json:"score"`
}

// A state is what /healthz says of an instance. llm-d's code notices no gap in the events,
// so that nobody knows whether it has them all; nor does its index count.
type state struct {
	Name          string         `json:"name"`
	Complete      bool           `json:"complete"`
	Gaps          int            `json:"gaps"`
	SkippedBlocks int            `json:"skipped_blocks"`
	BlockTokens   int            `json:"block_tokens"`
	Blocks        map[string]int `json:"blocks"`
}

func handler(f *fleet) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", f.health)
	mux.HandleFunc("POST /v1/lookup", f.lookup)
	return mux
}

func (f *fleet) lookup(w http.ResponseWriter, r *http.Request) {
	ids, err := readIDs(r)
	if err != nil {
		status := http.StatusBadRequest
		if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
			status = http.StatusRequestEntityTooLarge
		}
		answer(w, status, map[string]string{"error": err.Error()})
		return
	}
	params := r.URL.Query()
	model := params.Get("lora")
	if model == "" {
		model = params.Get("model")
	}
	blocks, err := f.blocks(r.Context(), ids, model)
	if err != nil {
		answer(w, http.StatusInternalServerError, map[string]string{"error": err.Error()})
		return
	}
	holdings := make([]holding, len(f.instances))
	for n, instance := range f.instances {
		score := blocks[instance.Name]
		holdings[n] = holding{instance.Name, instance.BlockTokens, int(math.Round(score * float64(instance.BlockTokens))), score}
	}
	answer(w, http.StatusOK, map[string]any{"instances": holdings})
}

// readIDs reads a prompt: a JSON array, or little-endian numbers of four bytes.
func readIDs(r *http.Request) (ids []uint32, err error) {
	body, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxBodyBytes))
	if err != nil {
		return nil, err
	}
	if kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind != "application/octet-stream" {
		if err := json.Unmarshal(body, &ids); err != nil {
			return nil, fmt.Errorf("an array of token ids is needed: %w", err)
		}
		return ids, nil
	}
	if len(body)%4 != 0 {
		return nil, fmt.Errorf("a body of %d bytes: each token id takes 4", len(body))
	}
	ids = make([]uint32, len(body)/4)
	for n := range ids {
		ids[n] = binary.LittleEndian.Uint32(body[4*n:])
	}
	return ids, nil
}

func (f *fleet) health(w http.ResponseWriter, _ *http.Request) {
	states := make([]state, len(f.instances))
	for n, instance := range f.instances {
		states[n] = state{Name: instance.Name, BlockTokens: instance.BlockTokens}
	}
	answer(w, http.StatusOK, map[string]any{"instances": states})
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(body) // who asked may be gone
}

// A fleet is instances, and llm-d's index of what they hold.
type fleet struct {
	instances []instance
	indexer   *kvcache.Indexer
	adapters  sync.Map // names of LoRA adapters that there are blocks of
}

// follow follows the instances' events until ctx is done.
func follow(ctx context.Context, instances []instance, seed string) (*fleet, error) {
	tokens, err := kvblock.NewChunkedTokenDatabase(&kvblock.TokenProcessorConfig{
		BlockSizeTokens: instances[0].BlockTokens, HashSeed: seed,
	})
	if err != nil {
		return nil, fmt.Errorf("token processor: %w", err)
	}
	config, err := kvcache.NewDefaultConfig()
	if err != nil {
		return nil, err
	}
	f := &fleet{instances: instances}
	if f.indexer, err = kvcache.NewKVCacheIndexer(ctx, config, tokens); err != nil {
		return nil, fmt.Errorf("indexer: %w", err)
	}
	for _, instance := range instances {
		// One worker: llm-d takes the events of one pod in turn, too.
		pool := kvevents.NewPool(&kvevents.Config{Concurrency: 1}, f.indexer.KVBlockIndex(), tokens,
			&named{engineadapter.NewVLLMAdapter(), instance.Name, &f.adapters})
		pool.Start(ctx)
		context.AfterFunc(ctx, func() { pool.Shutdown(context.WithoutCancel(ctx)) })
		subscribers := kvevents.NewSubscriberManager(pool)
		if err := subscribers.EnsureSubscriber(ctx, instance.Name, instance.Events, "", true); err != nil {
			return nil, fmt.Errorf("subscriber of %s: %w", instance.Name, err)
		}
	}
	return f, nil
}

// named reads messages as llm-d does, but tells by their connection whose they are. llm-d
// takes that from a topic, kv@POD@MODEL, which an instance need not have.
type named struct {
	kvevents.EngineAdapter
	instance string
	adapters *sync.Map
}

func (n *named) ShardingKey(*kvevents.RawMessage) string { return n.instance }

func (n *named) ParseMessage(message *kvevents.RawMessage) (pod, model string, batch kvevents.EventBatch, err error) {
	_, _, batch, err = n.EngineAdapter.ParseMessage(message)
	for _, event := range batch.Events {
		if stored, ok := event.(*kvevents.BlockStoredEvent); ok && stored.LoraName != nil {
			n.adapters.Store(*stored.LoraName, true)
		}
	}
	return n.instance, "", batch, err
}

// blocks returns how many leading blocks of a prompt each instance holds, weighted as
// llm-d does: 1 in the GPU, 0.8 in memory. The model counts if it is an adapter's name.
func (f *fleet) blocks(ctx context.Context, ids []uint32, model string) (map[string]float64, error) {
	if len(ids) > 0 {
		ids = ids[:len(ids)-1] // vLLM computes at least one
	}
	if _, ok := f.adapters.Load(model); !ok {
		model = ""
	}
	return f.indexer.ScoreTokens(ctx, ids, model, nil, nil)
}
