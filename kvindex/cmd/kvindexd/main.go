// SPDX-License-Identifier: Apache-2.0

// Kvindexd tells a router which vLLM instances hold the leading KV-cache blocks of a
// prompt. It follows the instances' KV events, and answers over HTTP.
//
//	kvindexd -instances instances.json -listen unix:///run/kvindexd.sock
//	kvindexd -instance a=tcp://10.0.0.1:5557,tcp://10.0.0.1:5558 -listen tcp://127.0.0.1:8079
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"kvtax/kvindex/cmd/kvindexd/feed"
	"kvtax/kvindex/cmd/kvindexd/fleet"
	"kvtax/kvindex/cmd/kvindexd/server"
)

// stopTimeout is for answers under way when it is told to stop.
const stopTimeout = 5 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	settings, err := parse(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvindexd:", err)
		os.Exit(2)
	}
	if err := run(ctx, settings, os.Stdout, slog.New(slog.NewTextHandler(os.Stderr, nil))); err != nil {
		fmt.Fprintln(os.Stderr, "kvindexd:", err)
		os.Exit(1)
	}
}

// run serves until ctx is done. It writes a line with each address, once it listens.
func run(ctx context.Context, s *settings, stdout io.Writer, log *slog.Logger) error {
	f, err := newFleet(s, log)
	if err != nil {
		return err
	}
	listeners, err := listenAll(s)
	if err != nil {
		return err
	}
	serving := server.New(f, s.server)
	failed := make(chan error, len(listeners))
	for n, listener := range listeners {
		go func() { failed <- serving.Serve(listener) }()
		fmt.Fprintln(stdout, s.listen[n].String(listener))
	}
	following, stop := context.WithCancel(ctx)
	defer stop()
	var background sync.WaitGroup
	for _, instance := range f.Instances() {
		background.Go(func() { feed.Run(following, log.With("instance", instance.Name), instance.Source, instance) })
	}
	if s.snapshot != "" {
		background.Go(func() { saveOften(following, f, s, log) })
	}
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	stop()
	stopping, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if err := serving.Shutdown(stopping); err != nil {
		serving.Close()
	}
	background.Wait()
	if s.snapshot != "" {
		err = errors.Join(err, f.Save(s.snapshot))
	}
	return err
}

// newFleet makes a fleet, from a snapshot if there is one that can be read.
func newFleet(s *settings, log *slog.Logger) (*fleet.Fleet, error) {
	f, err := fleet.New(s.fleet, log)
	if err != nil || s.snapshot == "" {
		return f, err
	}
	err = f.Load(s.snapshot)
	if err == nil {
		log.Info("the snapshot is read", "file", s.snapshot, "blocks", f.Blocks())
		return f, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		log.Warn("the snapshot is of no use", "error", err)
	}
	return fleet.New(s.fleet, log)
}

func saveOften(ctx context.Context, f *fleet.Fleet, s *settings, log *slog.Logger) {
	tick := time.NewTicker(s.snapshotEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := f.Save(s.snapshot); err != nil {
				log.Error("the snapshot is not written", "error", err)
			}
		}
	}
}

func listenAll(s *settings) ([]net.Listener, error) {
	var all []net.Listener
	for _, address := range s.listen {
		listener, err := address.listen(s.tls)
		if err != nil {
			for _, earlier := range all {
				earlier.Close()
			}
			return nil, err
		}
		all = append(all, listener)
	}
	return all, nil
}
