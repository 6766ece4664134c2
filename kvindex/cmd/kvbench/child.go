// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kvtax/kvindex/cmd/kvbench/results"
)

const (
	// A burst trial stops by itself after a minute, others end sooner; one that does not
	// is killed.
	killAfter = 3 * time.Minute
	// waitDelay is how long a killed trial may keep its output open.
	waitDelay = 5 * time.Second
	// stderrBytes is how much of the end of a failed trial's stderr is kept.
	stderrBytes = 2000
)

// runTrial runs one trial in a process of its own, and returns when that is gone. The
// process is killed when the context ends.
func runTrial(ctx context.Context, binaries string, s spec) results.Trial {
	t := results.Trial{
		Kind:        s.kind,
		Design:      s.name,
		Round:       s.round,
		GOMAXPROCS:  s.gomaxprocs,
		Args:        withoutFolders(s.args),
		LoadAverage: results.LoadAverage(),
	}
	limited, cancel := context.WithTimeout(ctx, killAfter)
	defer cancel()
	var stdout, stderr bytes.Buffer
	child := exec.CommandContext(limited, filepath.Join(binaries, s.binary), append([]string{"trial", s.kind}, s.args...)...)
	child.Env = append(os.Environ(), fmt.Sprint("GOMAXPROCS=", s.gomaxprocs))
	child.Stdout, child.Stderr = &stdout, &stderr
	child.WaitDelay = waitDelay
	child.SysProcAttr = diesWithParent()

	begin, busy := time.Now(), results.BusySeconds()
	err := child.Run()
	elapsed := time.Since(begin).Seconds()
	t.Seconds, t.OtherCores = elapsed, -1
	if after := results.BusySeconds(); busy >= 0 && child.ProcessState != nil {
		own := child.ProcessState.UserTime() + child.ProcessState.SystemTime()
		t.OtherCores = max(0, (after-busy-own.Seconds())/elapsed)
	}
	if err == nil {
		err = json.Unmarshal(stdout.Bytes(), t.Result())
	}
	if err != nil {
		t.Burst, t.Walk, t.Memory, t.Writes, t.Replay = nil, nil, nil, nil, nil
		t.Failure = failure(limited, err, stderr.Bytes())
	}
	return t
}

// failure says why a trial has no result.
func failure(ctx context.Context, err error, stderr []byte) string {
	if ctx.Err() == context.DeadlineExceeded {
		err = fmt.Errorf("killed after %v", killAfter)
	}
	end := stderr[max(0, len(stderr)-stderrBytes):]
	return strings.TrimSpace(fmt.Sprintf("%v\n%s", err, strings.ToValidUTF8(string(end), "?")))
}

// withoutFolders returns flags without the one that is another on each machine.
func withoutFolders(args []string) []string {
	kept := slices.Clone(args)
	if i := slices.Index(kept, "-traces"); i >= 0 {
		kept = slices.Delete(kept, i, i+2)
	}
	return kept
}
