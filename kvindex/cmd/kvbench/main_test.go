// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestMain is kvbench itself where a test asks for it: each trial is a process.
func TestMain(m *testing.M) {
	if os.Getenv("KVBENCH_TEST_PROGRAM") != "" {
		if err := command(context.Background(), os.Args[1:], os.Stdout, os.Stderr); err != nil {
			os.Stderr.WriteString(err.Error())
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// peerOf is a program that is kvindex under the peer's name, with a shell command after it.
func peerOf(t *testing.T, filter string) string {
	t.Helper()
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "peer")
	script := "#!/bin/sh\n" + own + " trial \"$@\"" + filter + "\n"
	if err := os.WriteFile(path, []byte(script), 0o777); err != nil {
		t.Fatal(err)
	}
	return path
}

func bench(t *testing.T, args ...string) error {
	t.Helper()
	t.Setenv("KVBENCH_TEST_PROGRAM", "1")
	var stderr bytes.Buffer
	return command(t.Context(), args, &stderr, &stderr)
}

func TestARunHasEveryRowOfBothSidesAndTheReportSaysSo(t *testing.T) {
	folder := t.TempDir()
	out, readme := filepath.Join(folder, "results.json"), filepath.Join(folder, "README.md")
	if err := bench(t, "run", "-quick", "-peer", peerOf(t, ""), "-out", out); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	var file results
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Trials) != 2*len(rows()) || file.Provenance.Crate != "1.6.1" {
		t.Fatalf("%d trials of %d rows, crate %q", len(file.Trials), len(rows()), file.Provenance.Crate)
	}
	for _, trial := range file.Trials {
		r := trial.Result
		if r.Latency == nil && r.BytesPerBlock == 0 || trial.Kind == "burst" && r.Events.PerS == 0 {
			t.Errorf("%s of %s: %+v", trial.Row, trial.Side, r)
		}
		if trial.Kind == "lookup" && (len(r.Answers) != hotPrefixes || !strings.Contains(r.Answers[0], ":")) {
			t.Errorf("%s: answers %q", trial.Row, r.Answers)
		}
	}
	if err := os.WriteFile(readme, []byte("before\n"+beginMarker+"old\n"+endMarker+"\nafter\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := bench(t, "report", "-in", out, "-readme", readme); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range rows() {
		if !strings.Contains(string(text), row.name+" | ") {
			t.Errorf("%q is not in the report", row.name)
		}
	}
	if s := string(text); !strings.HasPrefix(s, "before\n") || !strings.HasSuffix(s, "\nafter\n") || strings.Contains(s, "old\n") {
		t.Errorf("the report did not replace what is between the markers:\n%s", s)
	}
}

func TestARunFailsIfAnAnswerIsWrong(t *testing.T) {
	for name, test := range map[string]struct{ filter, says string }{
		"another answer": {" | sed s/35:263/35:262/", "the answers differ"},
		"a wrong one":    {` | sed s/'"wrong":0'/'"wrong":7'/`, "7 answers are wrong"},
	} {
		t.Run(name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "results.json")
			err := bench(t, "run", "-quick", "-peer", peerOf(t, test.filter), "-out", out)
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want %q", err, test.says)
			}
			if _, err := os.Stat(out); err == nil {
				t.Error("results were written")
			}
		})
	}
}

func TestTheReadmeSaysWhatWasMeasured(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "README.md")
	if err := os.WriteFile(path, readme, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := bench(t, "report", "-in", "../../results.json", "-readme", path); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, readme) {
		t.Errorf("README.md is not what kvbench report makes of results.json: %v", err)
	}
}

// TestThePeerHasTheSameLoad looks for the constants in the other program.
func TestThePeerHasTheSameLoad(t *testing.T) {
	source, err := os.ReadFile("peer/src/main.rs")
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]int{
		"PODS": podCount, "HOT_PREFIXES": hotPrefixes, "EVENT_BLOCKS": eventBlocks,
		"FILLER_BLOCKS": fillerBlocks, "KEPT_EVENTS": keptEvents,
	} {
		if line := fmt.Sprintf("const %s: usize = %d;", name, value); !strings.Contains(string(source), line) {
			t.Errorf("%q is not in peer/src/main.rs", line)
		}
	}
}
