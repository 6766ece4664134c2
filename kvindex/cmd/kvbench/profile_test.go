// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"regexp"
	"strconv"
	"testing"
)

// TestProfileTellsWhatLookupsWaitForAndWhatTheyCompute holds the report to what must be in
// it on any machine: time in the lock of lru's Get, and in formatting.
func TestProfileTellsWhatLookupsWaitForAndWhatTheyCompute(t *testing.T) {
	var out bytes.Buffer
	if err := command([]string{"profile", "-bursts", "6"}, &out, &out); err != nil {
		t.Fatal(err)
	}
	for _, row := range []string{
		"waits for the lock of `golang-lru/v2.\\(\\*Cache\\).Get`",
		"computes the arguments of the trace log",
		"a lookup computes the arguments of the trace log",
		"the whole prefix",
	} {
		found := regexp.MustCompile(`(?m)^\| ` + row + ` \| ([0-9.]+) \|`).FindSubmatch(out.Bytes())
		if found == nil {
			t.Fatalf("no row %q in\n%s", row, &out)
		}
		if figure, err := strconv.ParseFloat(string(found[1]), 64); err != nil || figure <= 0 {
			t.Errorf("%q is %s", row, found[1])
		}
	}
}
