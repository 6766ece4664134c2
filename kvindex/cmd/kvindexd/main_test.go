// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// started is a kvindexd in this process.
type started struct {
	addresses []string
	stop      func() error
}

func start(t *testing.T, arguments ...string) started {
	t.Helper()
	s, err := parse(append([]string{"-instance", "a=ipc:///nowhere"}, arguments...), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	out, in := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := run(ctx, s, in, slog.New(slog.DiscardHandler))
		in.CloseWithError(err)
		ended <- err
	}()
	found := started{stop: func() error { cancel(); return <-ended }}
	lines := bufio.NewScanner(out)
	for range s.listen {
		if !lines.Scan() {
			t.Fatal(lines.Err())
		}
		found.addresses = append(found.addresses, lines.Text())
	}
	return found
}

// get asks for /healthz.
func get(t *testing.T, address string, config *tls.Config) string {
	t.Helper()
	network, where, _ := strings.Cut(address, "://")
	transport := &http.Transport{
		TLSClientConfig: config,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, where)
		},
	}
	defer transport.CloseIdleConnections()
	scheme := "http"
	if config != nil {
		scheme = "https"
	}
	answer, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Get(scheme + "://localhost/healthz")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != 200 {
		t.Fatal(answer.Status, err)
	}
	return string(body)
}

func TestItServesUntilItIsToldToStopAndLeavesASnapshot(t *testing.T) {
	folder := t.TempDir()
	socket, snapshot := filepath.Join(folder, "socket"), filepath.Join(folder, "snapshot")
	for range 2 { // the second time from the snapshot
		one := start(t, "-listen", "unix://"+socket, "-listen", "tcp://127.0.0.1:0", "-snapshot", snapshot, "-snapshot-every", "10ms")
		for _, address := range one.addresses {
			if body := get(t, address, nil); !strings.Contains(body, `"name":"a","connected":false`) {
				t.Error(body)
			}
		}
		time.Sleep(50 * time.Millisecond)
		if err := one.stop(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(snapshot); err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob(filepath.Join(folder, "*")); len(left) != 1 {
			t.Errorf("left behind: %v", left)
		}
	}
}

func TestASocketThatIsInUseIsLeftAlone(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "socket")
	first := start(t, "-listen", "unix://"+socket)
	defer first.stop()
	s, err := parse([]string{"-instance", "a=ipc:///nowhere", "-listen", "unix://" + socket}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if err := run(context.Background(), s, io.Discard, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("two listen on one socket")
	}
	get(t, first.addresses[0], nil)
}

func TestASocketThatAKilledOneLeftIsTaken(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "socket")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	left.Close()
	one := start(t, "-listen", "unix://"+socket)
	defer one.stop()
	get(t, one.addresses[0], nil)
}

func TestTLSOnTCP(t *testing.T) {
	certificate, key, roots := selfSigned(t)
	one := start(t, "-listen", "tcp://127.0.0.1:0", "-tls-cert", certificate, "-tls-key", key)
	defer one.stop()
	get(t, one.addresses[0], &tls.Config{RootCAs: roots, ServerName: "localhost"})
}

func selfSigned(t *testing.T) (certificate, key string, roots *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	roots = x509.NewCertPool()
	asPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed})
	roots.AppendCertsFromPEM(asPEM)
	write := func(name string, data []byte) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	return write("cert", asPEM), write("key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded})), roots
}

func TestBadArgumentsAreRefusedInWords(t *testing.T) {
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	a := []string{"-instance", "a=tcp://h:1"}
	for says, arguments := range map[string][]string{
		"is needed":              {},
		"is no flag":             append(a, "more"),
		"ZMQ endpoint":           {"-instance", "a=tcp://*:1"},
		"Python takes":           append(a, "-hash-seed", "abc"),
		"the same endpoint":      append(a, "-instance", "b=tcp://h:1"),
		"instance b":             {"-instance", "b=tcp://h:1,h:2"},
		"NAME=EVENTS":            {"-instance", "a"},
		"unix:///PATH":           append(a, "-listen", "8080"),
		"above 0":                append(a, "-max-blocks", "0"),
		"no such file":           {"-instances", "/nowhere"},
		"its schema":             {"-instances", file(`{"instances":[]}`)},
		"\"\" is no ZMQ":         {"-instances", file(`{"schema":"kvtax.instances/1","instances":[{"name":"a"}]}`)},
		"there is no token":      append(a, "-token-file", file(" \n")),
		"-tls-cert and -tls-key": append(a, "-tls-cert", file("x")),
	} {
		if _, err := parse(arguments, io.Discard); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: %v, which does not say %q", arguments, err, says)
		}
	}
}

func TestInstancesComeFromAFileAsFleetLaunchWritesIt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "instances.json")
	text := `{"schema":"kvtax.instances/1","instances":[{"name":"i0","url":"http://127.0.0.1:1","role":"both",
		"kv_events":"ipc:///run/0","kv_events_replay":"ipc:///run/0.replay","block_tokens":16}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := parse([]string{"-instances", path, "-hash-seed", "0"}, io.Discard)
	if err != nil || len(s.fleet.Instances) != 1 || s.fleet.Instances[0].Source.Replay != "ipc:///run/0.replay" {
		t.Fatal(s, err)
	}
	if got := strings.Join(s.fleet.Seeds, " "); got != "0 vllm-none-hash" {
		t.Error(got)
	}
	if s.listen[0].where != "127.0.0.1:8079" {
		t.Error("it listens at", s.listen[0])
	}
}
