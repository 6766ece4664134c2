// SPDX-License-Identifier: Apache-2.0

// Llmd-lookup answers as kvindexd does which vLLM instances hold the leading KV-cache
// blocks of a prompt, but by llm-d's own code: its subscribers, event pool, index, token
// processor and block scorer. It is there to be compared with.
//
//	llmd-lookup -instances instances.json -listen unix:///run/llmd-lookup.sock
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

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
