// SPDX-License-Identifier: Apache-2.0

package llmd_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
)

const upstream = "github.com/llm-d/llm-d-kv-cache"

// TestUpstreamsOwnTestsPass runs the tests that upstream has for its in-memory index, as
// they are in the pinned module, with the adapter in its place.
func TestUpstreamsOwnTestsPass(t *testing.T) {
	tests := filepath.Join(strings.TrimSpace(run(t, "go", "list", "-m", "-f", "{{.Dir}}", upstream)),
		"pkg", "kvcache", "kvblock")
	overlay := overlayOf(t, map[string]string{
		"index_test.go":     readFile(t, tests, "index_test.go"),
		"in_memory_test.go": withAdapter(t, readFile(t, tests, "in_memory_test.go")),
	})
	args := []string{"test", "-v", "-count=1", "-overlay", overlay, "./conformance"}
	if hasRaceDetector() {
		args = append(args[:1:1], append([]string{"-race"}, args[1:]...)...)
	}
	output := run(t, "go", args...)
	if n := strings.Count(output, "--- PASS: TestInMemoryIndexBehavior/"); n != 24 {
		t.Errorf("%d of upstream's 24 common tests passed", n)
	}
	for _, name := range []string{"Size", "PodCacheSize"} {
		if !strings.Contains(output, "--- PASS: TestInMemoryIndex"+name+" ") {
			t.Errorf("TestInMemoryIndex%s did not pass", name)
		}
	}
}

// hasRaceDetector reports whether this test was built with -race.
func hasRaceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// withAdapter lets upstream's tests make the adapter instead of upstream's index.
func withAdapter(t *testing.T, source string) string {
	t.Helper()
	const theirs = "NewInMemoryIndex("
	if n := strings.Count(source, theirs); n != 3 {
		t.Fatalf("upstream's tests make %d indexes, 3 are known", n)
	}
	return strings.ReplaceAll(source, theirs, "newIndexUnderTest(")
}

// overlayOf returns a file for go's -overlay that lays files over the folder conformance.
func overlayOf(t *testing.T, files map[string]string) string {
	t.Helper()
	folder, err := filepath.Abs("conformance")
	if err != nil {
		t.Fatal(err)
	}
	place := t.TempDir()
	replace := map[string]string{}
	for name, text := range files {
		replace[filepath.Join(folder, name)] = writeFile(t, place, name, []byte(text))
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	return writeFile(t, place, "overlay.json", text)
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, output)
	}
	return string(output)
}

func readFile(t *testing.T, elements ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(elements...))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func writeFile(t *testing.T, folder, name string, text []byte) string {
	t.Helper()
	path := filepath.Join(folder, name)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
