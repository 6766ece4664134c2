// SPDX-License-Identifier: Apache-2.0

// Kvindexd tells a router which vLLM instances hold the leading KV-cache blocks of a
// prompt. It follows the instances' KV events, and answers over HTTP.
//
//	kvindexd -instances instances.json -listen unix:///run/kvindexd.sock
//	kvindexd -instance a=tcp://10.0.0.1:5557,tcp://10.0.0.1:5558 -listen tcp://127.0.0.1:8079
package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"kvtax/kvindex/cmd/kvindexd/blockhash"
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

// settings are what the command line says.
type settings struct {
	fleet         fleet.Config
	server        server.Config
	listen        []address
	tls           *tls.Config
	snapshot      string
	snapshotEvery time.Duration
}

const defaultListen = "tcp://127.0.0.1:8079"

// parse reads the command line, and the files that it names.
func parse(arguments []string, stderr io.Writer) (*settings, error) {
	s := new(settings)
	flags := flag.NewFlagSet("kvindexd", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // what is wrong is said once, by who called
	file := flags.String("instances", "", "a kvtax.instances/1 `FILE`: name, kv_events, kv_events_replay of each")
	flags.Func("instance", "`NAME=EVENTS[,REPLAY]`, ZMQ endpoints of one instance; may be repeated", func(text string) error {
		return s.addInstance(text)
	})
	flags.Func("listen", "unix:///PATH or tcp://HOST:PORT, port 0 for a free one; may be repeated (default "+defaultListen+")", func(text string) error {
		return s.addAddress(text)
	})
	seed := flags.String("hash-seed", "", "the PYTHONHASHSEED of the instances; vLLM 0.30 and later need none")
	flags.IntVar(&s.fleet.MaxBlocks, "max-blocks", 4_000_000, "different blocks known at most: about 46 bytes for each")
	memoMiB := flags.Int("memo-mib", 64, "memory for the names of the prompts that were asked for")
	maxBodyMiB := flags.Int64("max-body-mib", 16, "a longer request is refused")
	flags.StringVar(&s.snapshot, "snapshot", "", "a `FILE` to start from, and to write at the end")
	flags.DurationVar(&s.snapshotEvery, "snapshot-every", time.Minute, "and so often")
	token := flags.String("token-file", "", "a `FILE` with what requests must give as Authorization: Bearer")
	certificate := flags.String("tls-cert", "", "a `FILE` with a certificate: TLS on TCP")
	key := flags.String("tls-key", "", "a `FILE` with its key")
	if err := flags.Parse(arguments); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			flags.SetOutput(stderr)
			flags.PrintDefaults()
		}
		return nil, err
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("%q is no flag", flags.Arg(0))
	}
	s.fleet.Seeds = []string{blockhash.DefaultSeed}
	if *seed != "" {
		if _, err := strconv.ParseUint(*seed, 10, 32); err != nil {
			return nil, fmt.Errorf("-hash-seed %s: Python takes a whole number from 0 to 4294967295", *seed)
		}
		s.fleet.Seeds = append([]string{*seed}, s.fleet.Seeds...)
	}
	s.fleet.MemoBytes = *memoMiB << 20
	s.server.MaxBodyBytes = *maxBodyMiB << 20
	if len(s.listen) == 0 {
		s.addAddress(defaultListen)
	}
	return s, errors.Join(s.check(*memoMiB, *maxBodyMiB), s.readInstances(*file), s.readToken(*token), s.readTLS(*certificate, *key))
}

func (s *settings) check(memoMiB int, maxBodyMiB int64) error {
	if memoMiB < 1 || maxBodyMiB < 1 || s.fleet.MaxBlocks < 1 || s.snapshotEvery <= 0 {
		return errors.New("-max-blocks, -memo-mib, -max-body-mib and -snapshot-every must be above 0")
	}
	return nil
}

func (s *settings) addInstance(text string) error {
	name, endpoints, ok := strings.Cut(text, "=")
	if !ok || name == "" {
		return errors.New("NAME=EVENTS or NAME=EVENTS,REPLAY is needed")
	}
	events, replay, _ := strings.Cut(endpoints, ",")
	return s.add(name, events, replay)
}

func (s *settings) add(name, events, replay string) error {
	source := feed.Source{Events: feed.Endpoint(events), Replay: feed.Endpoint(replay)}
	if err := source.Events.Check(); err != nil {
		return fmt.Errorf("instance %s: %w", name, err)
	}
	if replay != "" {
		if err := source.Replay.Check(); err != nil {
			return fmt.Errorf("instance %s: %w", name, err)
		}
	}
	for _, other := range s.fleet.Instances {
		if other.Source.Events == source.Events {
			return fmt.Errorf("instances %s and %s have the same endpoint, %s", other.Name, name, events)
		}
	}
	s.fleet.Instances = append(s.fleet.Instances, fleet.InstanceConfig{Name: name, Source: source})
	return nil
}

// readInstances reads a file as kvtax_fleet.launch writes it, and kvtax_fleet.proxy reads it.
func (s *settings) readInstances(file string) error {
	if file == "" {
		if len(s.fleet.Instances) == 0 {
			return errors.New("-instances FILE or -instance NAME=EVENTS,REPLAY is needed")
		}
		return nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var document struct {
		Schema    string
		Instances []struct {
			Name   string
			Events string `json:"kv_events"`
			Replay string `json:"kv_events_replay"`
		}
	}
	if err := json.Unmarshal(data, &document); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if document.Schema != "kvtax.instances/1" {
		return fmt.Errorf("%s: its schema is %q, not kvtax.instances/1", file, document.Schema)
	}
	for _, instance := range document.Instances {
		if err := s.add(instance.Name, instance.Events, instance.Replay); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

func (s *settings) readToken(file string) error {
	if file == "" {
		return nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if s.server.Token = strings.TrimSpace(string(data)); s.server.Token == "" {
		return fmt.Errorf("%s: there is no token in it", file)
	}
	return nil
}

func (s *settings) readTLS(certificate, key string) error {
	if certificate == "" && key == "" {
		return nil
	}
	pair, err := tls.LoadX509KeyPair(certificate, key)
	if err != nil {
		return fmt.Errorf("-tls-cert and -tls-key: %w", err)
	}
	s.tls = &tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2", "http/1.1"}}
	return nil
}

// An address is where to listen.
type address struct {
	network string // "unix" or "tcp"
	where   string
}

func (s *settings) addAddress(text string) error {
	if path, ok := strings.CutPrefix(text, "unix://"); ok && path != "" {
		s.listen = append(s.listen, address{"unix", path})
		return nil
	}
	where, ok := strings.CutPrefix(text, "tcp://")
	if _, _, err := net.SplitHostPort(where); !ok || err != nil {
		return fmt.Errorf("unix:///PATH or tcp://HOST:PORT is needed, not %q", text)
	}
	s.listen = append(s.listen, address{"tcp", where})
	return nil
}

// String is the address as a client needs it.
func (a address) String(listener net.Listener) string {
	if a.network == "unix" {
		return "unix://" + a.where
	}
	return "tcp://" + listener.Addr().String()
}

// listen listens; on TCP with TLS, if there is a configuration for it.
func (a address) listen(config *tls.Config) (net.Listener, error) {
	if a.network == "unix" {
		a.removeStale()
	}
	listener, err := net.Listen(a.network, a.where)
	if err != nil || config == nil || a.network == "unix" {
		return listener, err
	}
	return tls.NewListener(listener, config), nil
}

// removeStale removes a socket that a killed process has left: nobody answers there.
func (a address) removeStale() {
	info, err := os.Stat(a.where)
	if err != nil || info.Mode()&os.ModeSocket == 0 {
		return
	}
	conn, err := net.DialTimeout(a.network, a.where, time.Second)
	if err == nil {
		conn.Close()
		return
	}
	os.Remove(a.where)
}
