// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ulikunitz/xz"
)

const traces = "../../../fleet/traces/"

func compressed(t *testing.T, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := xz.NewWriter(&b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func write(t *testing.T, content []byte) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "trace.jsonl.xz")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const (
	conversationLines = `{"timestamp": 1500, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [0]}
`
	sessionLines = `{"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [
		{"t": 0.5, "type": "n", "in": 130, "out": 9, "hash_ids": [1, 2]},
		{"t": 70, "type": "subagent", "requests": [
			{"t": 0, "type": "n", "in": 64, "hash_ids": [7]}, {"t": 20.25, "type": "n", "in": 64, "hash_ids": [8]}]},
		{"t": 80, "type": "s", "in": 190, "out": 9, "hash_ids": [1, 2, 3]}]}
{"id": "b", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0, "type": "n", "in": 130, "hash_ids": [1, 2]}]}
`
)

// oneLineEach takes the line breaks out of the records above.
func oneLineEach(s string) string {
	return strings.ReplaceAll(s, "\n\t\t", " ") // breaks within a record are indented
}

func TestConversationGivesRequestsInTimeOrder(t *testing.T) {
	requests, err := Conversation(write(t, compressed(t, conversationLines)))
	if err != nil {
		t.Fatal(err)
	}
	want := []Request{
		{0, chainOf(0, []uint32{0}), -1},
		{1500 * time.Millisecond, chainOf(0, []uint32{0, 1, 2}), -1},
	}
	if !reflect.DeepEqual(requests, want) {
		t.Errorf("got %v, want %v", requests, want)
	}
}

func TestSessionsStartAMinuteApartAndSubagentsAreFlattened(t *testing.T) {
	lines := strings.ReplaceAll(oneLineEach(sessionLines), "\n\t", " ")
	requests, err := Sessions(write(t, compressed(t, lines)))
	if err != nil {
		t.Fatal(err)
	}
	want := []Request{
		{500 * time.Millisecond, chainOf(0, []uint32{1, 2}), 0},
		{60 * time.Second, chainOf(1, []uint32{1, 2}), 1},
		{70 * time.Second, chainOf(0, []uint32{7}), 0},
		{80 * time.Second, chainOf(0, []uint32{1, 2, 3}), 0},
		{90*time.Second + 250*time.Millisecond, chainOf(0, []uint32{8}), 0},
	}
	if !reflect.DeepEqual(requests, want) {
		t.Errorf("got %v, want %v", requests, want)
	}
}

func TestKeysAreThoseOfOneSession(t *testing.T) {
	seen := map[uint64]bool{}
	for session := range uint32(300) {
		for _, key := range chainOf(session, []uint32{0, 1, 2, 3, 1 << 31, 1<<32 - 1}) {
			if seen[key] {
				t.Fatalf("session %d shares a key with another", session)
			}
			seen[key] = true
		}
	}
}

func TestATraceThatIsNotWhatItSaysIsRefused(t *testing.T) {
	conversation := func(path string) error { _, err := Conversation(path); return err }
	sessions := func(path string) error { _, err := Sessions(path); return err }
	first, _, _ := strings.Cut(conversationLines, "\n")
	firstSession, secondSession, _ := strings.Cut(strings.ReplaceAll(oneLineEach(sessionLines), "\n\t", " "), "\n")
	whole := compressed(t, strings.Repeat(conversationLines, 50))
	for _, test := range []struct {
		name    string
		read    func(path string) error
		content []byte
		says    []string
	}{
		{"too many tokens", conversation, compressed(t, first+"\n"+strings.Replace(first, "1030", "9000", 1)+"\n"),
			[]string{"line 2", "3 blocks of 512 tokens are 1536 tokens", "9000"}},
		{"too few tokens", conversation, compressed(t, strings.Replace(first, "1030", "1023", 1)+"\n"),
			[]string{"line 1", "1536", "1023"}},
		{"another block size", sessions, compressed(t, firstSession+"\n"+strings.Replace(secondSession, "64", "16", 1)),
			[]string{"line 2", "2 blocks of 16 tokens are 32 tokens", "130", "at 0 s"}},
		{"within a subagent", sessions, compressed(t, strings.Replace(firstSession, `"hash_ids": [8]`, `"hash_ids": [8, 9, 10]`, 1)+"\n"),
			[]string{"line 1", "192", "64", "at 20.25 s"}},
		{"another scope", sessions, compressed(t, strings.Replace(firstSession, "local", "global", 1)+"\n"),
			[]string{"line 1", `"global"`}},
		{"no requests", sessions, compressed(t, `{"block_size": 64, "hash_id_scope": "local"}`+"\n"),
			[]string{"line 1", "without requests"}},
		{"a line that is not JSON", conversation, compressed(t, first+"\n{\"timestamp\": 1,\n"),
			[]string{"line 2", "JSON"}},
		{"an id that is none", conversation, compressed(t, strings.Replace(first, "0, 1, 2", "0, -1, 2", 1)+"\n"),
			[]string{"line 1", "-1"}},
		{"torn xz", conversation, whole[:len(whole)-20], []string{"line ", "torn"}},
		{"torn text", conversation, compressed(t, first+"\n"+first[:20]), []string{"line 2", "torn"}},
		{"no xz", conversation, []byte(conversationLines), []string{"xz"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := write(t, test.content)
			err := test.read(path)
			if err == nil {
				t.Fatal("no error")
			}
			for _, part := range append(test.says, path) {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
		})
	}
}

func TestAMissingTraceIsNamed(t *testing.T) {
	if _, err := Conversation("no/such/file"); err == nil || !strings.Contains(err.Error(), "no/such/file") {
		t.Error(err)
	}
}

// TestTheRealTracesAreWhole compares with what their sources say of them.
func TestTheRealTracesAreWhole(t *testing.T) {
	for _, test := range []struct {
		file                       string
		read                       func(string) ([]Request, error)
		requests, blocks, sessions int
	}{
		{"mooncake_conversation_trace.jsonl.xz", Conversation, 12_031, 288_500, 1},
		{"claude_code_sessions_le62k.jsonl.xz", Sessions, 734, 384_095, 44},
		{"claude_code_sessions_any.jsonl.xz", Sessions, 6_493, 13_187_022, 110},
	} {
		t.Run(test.file, func(t *testing.T) {
			requests, err := test.read(traces + test.file)
			if err != nil {
				t.Fatal(err)
			}
			blocks, sessions := 0, map[int]bool{}
			for _, r := range requests {
				blocks += len(r.Chain)
				sessions[r.Session] = true
			}
			if len(requests) != test.requests || blocks != test.blocks || len(sessions) != test.sessions {
				t.Errorf("%d requests of %d sessions with %d blocks", len(requests), len(sessions), blocks)
			}
			if !slices.IsSortedFunc(requests, func(a, b Request) int { return int(a.At - b.At) }) {
				t.Error("not in time order")
			}
		})
	}
}

func TestEqualSeedsGiveEqualTraces(t *testing.T) {
	one, same, other := Synthetic(1, 200), Synthetic(1, 200), Synthetic(2, 200)
	if !reflect.DeepEqual(one, same) {
		t.Error("the same seed gave another trace")
	}
	if reflect.DeepEqual(one, other) {
		t.Error("another seed gave the same trace")
	}
}

func TestATurnContinuesTheTurnBefore(t *testing.T) {
	last := map[int][]uint64{}
	owner := map[uint64]int{}
	turns := 0
	for i, r := range Synthetic(1, 2_000) {
		before := last[r.Session]
		if len(before) > 0 {
			turns++
			if !slices.Equal(before, r.Chain[:len(before)]) || len(r.Chain) == len(before) {
				t.Fatalf("request %d does not continue session %d", i, r.Session)
			}
		}
		for _, key := range r.Chain[len(before):] {
			if of, ok := owner[key]; ok {
				t.Fatalf("request %d: sessions %d and %d share a block", i, of, r.Session)
			}
			owner[key] = r.Session
		}
		last[r.Session] = r.Chain
	}
	if turns < 1_000 {
		t.Errorf("only %d of 2,000 requests continue a session", turns)
	}
}
