// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvtax/kvindex/cmd/kvbench/design"
	"kvtax/kvindex/cmd/kvbench/report"
	"kvtax/kvindex/cmd/kvbench/results"
)

// asKvbench makes the test binary, started once more, behave as kvbench: its trials are
// then the same binary again.
const asKvbench = "KVBENCH_TEST_AS_KVBENCH"

func TestMain(m *testing.M) {
	if os.Getenv(asKvbench) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

const oursDesign = "kvindex"

func TestEveryPlannedDesignExists(t *testing.T) {
	for _, name := range slices.Concat(burstDesigns, walkDesigns, replayDesigns) {
		if !slices.Contains(design.Names(), name) {
			t.Errorf("no design is named %q", name)
		}
	}
}

func TestEqualSeedsPlanEqualRuns(t *testing.T) {
	text := func(seed uint64) string {
		var names []string
		for _, s := range plan(results.Kinds, 3, 4, false, "", seed) {
			names = append(names, s.String())
		}
		return strings.Join(names, "\n")
	}
	if text(1) != text(1) || text(1) == text(2) {
		t.Error("the order does not go by the seed")
	}
	for _, part := range []string{"round 3, GOMAXPROCS 1: burst upstream ", "round 1, GOMAXPROCS 2: burst merged ", "round 1, GOMAXPROCS 4: burst kvindex "} {
		if !strings.Contains(text(1), part) {
			t.Errorf("no %q in\n%s", part, text(1))
		}
	}
}

// TestAQuickRunOfSomeKindsIsReported goes all the way but for what takes long.
func TestAQuickRunOfSomeKindsIsReported(t *testing.T) {
	t.Setenv(asKvbench, "1")
	folder := t.TempDir()
	out, readme := filepath.Join(folder, "results.json"), filepath.Join(folder, "README.md")
	err := runCommand(context.Background(), []string{"-out", out, "-quick", "-only", "writes"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	file, err := results.Read(out)
	if err != nil {
		t.Fatal(err)
	}
	if len(file.Trials) != len(writesDesigns) || file.Planned != len(file.Trials) {
		t.Fatalf("%d of %d trials", len(file.Trials), file.Planned)
	}
	for _, trial := range file.Trials {
		if trial.Writes == nil || trial.Writes.AddKeysPerSecond <= 0 {
			t.Errorf("%+v", trial)
		}
	}
	if err := os.WriteFile(readme, []byte("<!-- kvbench:begin -->\n<!-- kvbench:end -->\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := reportCommand([]string{"-in", out, "-readme", readme}); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(readme); err != nil || !bytes.Contains(text, []byte("kvbench run")) {
		t.Errorf("%v\n%s", err, text)
	}
}

func TestATrialThatFailsIsRecordedAndFailsTheRun(t *testing.T) {
	t.Setenv(asKvbench, "1")
	out := filepath.Join(t.TempDir(), "results.json")
	err := runFlags{out: out}.run(context.Background(), []spec{
		{oursDesign, results.KindReplay, 1, 1, flags("trace", "conversation", "traces", t.TempDir())(oursDesign), time.Second},
		{oursDesign, results.KindWrites, 1, 1, flags("capacity", 1_000, "duration", time.Millisecond)(oursDesign), time.Second},
	}, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "1 of 2 trials failed") {
		t.Fatalf("%v", err)
	}
	file, err := results.Read(out)
	if err != nil {
		t.Fatal(err)
	}
	if failed := file.Trials[0]; failed.Replay != nil || !strings.Contains(failed.Failure, "conversation_trace") {
		t.Errorf("%+v", failed)
	}
	if other := file.Trials[1]; other.Writes == nil || other.Failure != "" {
		t.Errorf("%+v", other)
	}
}

func TestASecondRunOnTheSameFileIsRefused(t *testing.T) {
	out := filepath.Join(t.TempDir(), "results.json")
	unlock, err := results.Lock(out)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	err = runCommand(context.Background(), []string{"-out", out, "-quick", "-only", "writes"}, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "another run") {
		t.Errorf("%v", err)
	}
}

// TestAnInterruptedRunLeavesItsResultsAndNoProcess uses real processes throughout.
func TestAnInterruptedRunLeavesItsResultsAndNoProcess(t *testing.T) {
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(signal.String(), func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "results.json")
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			run := exec.Command(self, "run", "-out", out, "-quick", "-only", "memory,walk")
			run.Env = append(os.Environ(), asKvbench+"=1")
			var stderr bytes.Buffer
			run.Stderr = &stderr
			if err := run.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { run.Process.Kill(); run.Wait() })
			waitFor(t, "a first result", func() bool { _, err := os.Stat(out); return err == nil })
			waitFor(t, "a trial", func() bool { return len(children(t, run.Process.Pid)) > 0 })
			before := children(t, run.Process.Pid)
			if err := run.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			if err := run.Wait(); err == nil {
				t.Error("it exits with 0")
			}
			waitFor(t, "the trial to end", func() bool { return !slices.ContainsFunc(before, isRunning) })
			file, err := results.Read(out)
			if err != nil || len(file.Trials) == 0 || len(file.Trials) >= file.Planned {
				t.Fatalf("%v: %+v", err, file)
			}
			if signal != syscall.SIGKILL && !strings.Contains(stderr.String(), "interrupted") {
				t.Errorf("stderr: %s", stderr.String())
			}
		})
	}
}

func waitFor(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for begin := time.Now(); !holds(); time.Sleep(time.Millisecond) {
		if time.Since(begin) > 30*time.Second {
			t.Fatalf("still waiting for %s", what)
		}
	}
}

// children returns the processes that another one started.
func children(t *testing.T, parent int) []int {
	t.Helper()
	files, err := filepath.Glob("/proc/" + strconv.Itoa(parent) + "/task/*/children")
	if err != nil || len(files) == 0 {
		t.Skip("this system does not list the children of a process")
	}
	var found []int
	for _, file := range files {
		text, _ := os.ReadFile(file) // a thread may have ended
		for _, field := range strings.Fields(string(text)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			found = append(found, pid)
		}
	}
	return found
}

// isRunning is false for a process whose end nobody has asked for yet, too.
func isRunning(pid int) bool {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(text), ") ")
	return !strings.HasPrefix(state, "Z")
}

func TestTheReadmeSaysWhatTheResultsSay(t *testing.T) {
	file, err := results.Read("../../results.json")
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("nothing is measured yet")
	}
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	want, err := report.Replace(string(readme), report.Short(file))
	if err != nil {
		t.Fatal(err)
	}
	if string(readme) != want {
		t.Error("kvindex/README.md is not made from kvindex/results.json: run `kvbench report -in results.json -readme README.md`")
	}
}
