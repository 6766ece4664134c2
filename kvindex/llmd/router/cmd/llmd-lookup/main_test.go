// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestInstancesThatCannotBeFollowedAreRefused(t *testing.T) {
	for name, one := range map[string]struct{ text, said string }{
		"no file":       {"", "no such file"},
		"another file":  {`{"schema": "other/1", "instances": [{}]}`, `"other/1" with 1 instances`},
		"no instances":  {`{"schema": "kvtax.instances/1"}`, "with 0 instances"},
		"no events":     {`{"schema": "kvtax.instances/1", "instances": [{"name": "a"}]}`, "a has no `kv_events`"},
		"several sizes": {`{"schema": "kvtax.instances/1", "instances": [{"name": "a", "kv_events": "ipc:///a"}, {"name": "b", "kv_events": "ipc:///b", "block_tokens": 32}]}`, "of 16 tokens at a and of 32 at b"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "instances.json")
			if one.text != "" {
				if err := os.WriteFile(file, []byte(one.text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			_, err := readInstances(file)
			if err == nil || !strings.Contains(err.Error(), one.said) {
				t.Errorf("the error is %v, and should say %q", err, one.said)
			}
		})
	}
}

// started returns how to ask an llmd-lookup that follows an instance which is not there.
func started(t *testing.T) func(method, path, kind, body string) (int, string) {
	t.Helper()
	folder := t.TempDir()
	file := filepath.Join(folder, "instances.json")
	text := `{"schema": "kvtax.instances/1", "instances": [{"name": "a", "kv_events": "ipc://` + folder + `/events"}]}`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(folder, "socket")
	reader, writer := io.Pipe()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		err := run(ctx, []string{"-instances", file, "-listen", "unix://" + socket}, writer, io.Discard)
		writer.CloseWithError(err)
		ended <- err
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	line := make([]byte, len("unix://"+socket+"\n"))
	if _, err := io.ReadFull(reader, line); err != nil || string(line) != "unix://"+socket+"\n" {
		t.Fatalf("it says %q, %v", line, err)
	}
	client := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
	return func(method, path, kind, body string) (int, string) {
		t.Helper()
		request, err := http.NewRequestWithContext(t.Context(), method, "http://index"+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Content-Type", kind)
		answer, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer.StatusCode, strings.TrimSpace(string(text))
	}
}

func TestAnswersHaveTheShapeOfKvindexds(t *testing.T) {
	ask := started(t)
	ids, _ := json.Marshal(make([]uint32, 40))
	nothing := `{"instances":[{"name":"a","block_tokens":16,"tokens":0,"score":0}]}`
	for _, one := range []struct {
		method, path, kind, body string
		status                   int
		said                     string
	}{
		{"POST", "/v1/lookup?model=m", "application/json", string(ids), 200, nothing},
		{"POST", "/v1/lookup", "application/octet-stream", strings.Repeat("\x00", 160), 200, nothing},
		{"POST", "/v1/lookup", "application/json", "[]", 200, nothing},
		{"POST", "/v1/lookup", "application/octet-stream", "123", 400, `{"error":"a body of 3 bytes: each token id takes 4"}`},
		{"POST", "/v1/lookup", "application/json", "[-1]", 400, ""},
		{"POST", "/v1/lookup", "application/json", strings.Repeat(" ", maxBodyBytes+1), 413, ""},
		{"GET", "/healthz", "", "", 200, `{"instances":[{"name":"a","complete":false,"gaps":0,"skipped_blocks":0,"block_tokens":16,"blocks":null}]}`},
	} {
		status, said := ask(one.method, one.path, one.kind, one.body)
		if status != one.status || one.said != "" && said != one.said {
			t.Errorf("%s %s %.20q: %d %s", one.method, one.path, one.body, status, said)
		}
	}
}
