// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/google/pprof/profile"
)

// Parts of the names of functions by which a stack is told.
const (
	ofLookup     = "InMemoryIndex).Lookup"
	ofAdd        = "InMemoryIndex).Add"
	ofFormatting = "podsPerKeyPrintHelper"
	ofGC         = "runtime.gcBgMarkWorker"
)

var typeArguments = regexp.MustCompile(`\[.*\]`)

// sum adds up the nanoseconds of a profile's samples by what kind calls their stacks; ""
// leaves one out.
func sum(p *profile.Profile, kind func(stack []string) string) map[string]float64 {
	of := make(map[string]float64)
	for _, sample := range p.Sample {
		if what := kind(functions(sample)); what != "" {
			of[what] += float64(sample.Value[1])
		}
	}
	return of
}

// functions are those of a sample's stack, the innermost first.
func functions(sample *profile.Sample) []string {
	var names []string
	for _, location := range sample.Location {
		for _, line := range location.Line {
			names = append(names, line.Function.Name)
		}
	}
	return names
}

func within(stack []string, part string) bool {
	return slices.ContainsFunc(stack, func(name string) bool { return strings.Contains(name, part) })
}

// waitingLookup names the lock that a lookup waited for.
func waitingLookup(stack []string) string {
	if !within(stack, ofLookup) {
		return ""
	}
	return "waits for the lock of " + lockHolder(stack)
}

// lookupPart tells what a lookup computed.
func lookupPart(stack []string) string {
	switch {
	case within(stack, ofFormatting):
		return "computes the arguments of the trace log"
	case within(stack, ofLookup):
		return "computes all else"
	}
	return ""
}

// cpuPart tells who computed.
func cpuPart(stack []string) string {
	switch part := lookupPart(stack); {
	case part != "":
		return "a lookup " + part
	case within(stack, ofAdd):
		return "events are added"
	case within(stack, ofGC):
		return "the garbage collector, beside others"
	}
	return "all else"
}

// lockHolder names the function that took or released a lock.
func lockHolder(stack []string) string {
	for _, name := range stack {
		if strings.HasPrefix(name, "sync.") || strings.HasPrefix(name, "internal/") || strings.HasPrefix(name, "runtime.") {
			continue
		}
		parts := strings.Split(typeArguments.ReplaceAllString(name, ""), "/")
		return "`" + strings.Join(parts[max(0, len(parts)-2):], "/") + "`"
	}
	return "Go's runtime"
}

// largest returns the names, those of the largest numbers first.
func largest(of map[string]float64) []string {
	return slices.SortedFunc(maps.Keys(of), func(a, b string) int {
		if of[a] != of[b] {
			if of[a] > of[b] {
				return -1
			}
			return 1
		}
		return strings.Compare(a, b)
	})
}
