// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"kvtax/kvindex/cmd/kvindexd/fleet"
)

// metrics are what requests pay for; the rest is read when somebody asks.
type metrics struct {
	prompts atomic.Uint64
	tokens  atomic.Uint64
	refused atomic.Uint64
	nanos   atomic.Uint64
	within  [len(bucketsUs) + 1]atomic.Uint64
}

// bucketsUs are upper ends, in microseconds.
var bucketsUs = [...]int64{10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 100_000}

// observe notes the time from the start of a request's handler to its answer's last byte.
func (m *metrics) observe(took time.Duration) {
	m.nanos.Add(uint64(took))
	n := 0
	for n < len(bucketsUs) && took.Microseconds() >= bucketsUs[n] {
		n++
	}
	m.within[n].Add(1)
}

func (s *Server) writeMetrics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	m := &s.metrics
	counter := func(name, what string, value uint64) {
		fmt.Fprintf(w, "# HELP kvindexd_%s %s\n# TYPE kvindexd_%s counter\nkvindexd_%s %d\n", name, what, name, name, value)
	}
	counter("prompts_total", "Prompts looked up.", m.prompts.Load())
	counter("prompt_tokens_total", "Token ids of these prompts.", m.tokens.Load())
	counter("refused_total", "Requests refused.", m.refused.Load())
	m.writeTimes(w)
	fmt.Fprintf(w, "# HELP kvindexd_blocks Different blocks that are known.\n# TYPE kvindexd_blocks gauge\nkvindexd_blocks %d\n", s.fleet.Blocks())
	fmt.Fprintf(w, "# HELP kvindexd_max_blocks How many may be.\n# TYPE kvindexd_max_blocks gauge\nkvindexd_max_blocks %d\n", s.fleet.MaxBlocks())
	writeInstances(w, s.statuses())
}

func (m *metrics) writeTimes(w io.Writer) {
	const name = "kvindexd_lookup_seconds"
	fmt.Fprintf(w, "# HELP %s Time of a request, in its handler.\n# TYPE %s histogram\n", name, name)
	count := uint64(0)
	for n := range m.within {
		count += m.within[n].Load()
		end := "+Inf"
		if n < len(bucketsUs) {
			end = strconv.FormatFloat(float64(bucketsUs[n])/1e6, 'f', -1, 64)
		}
		fmt.Fprintf(w, "%s_bucket{le=%q} %d\n", name, end, count)
	}
	fmt.Fprintf(w, "%s_sum %g\n%s_count %d\n", name, float64(m.nanos.Load())/1e9, name, count)
}

func writeInstances(w io.Writer, all []fleet.Status) {
	for _, one := range []struct {
		name, kind, what string
		value            func(*fleet.Status) any
	}{
		{"connected", "gauge", "1 if its events arrive.", func(s *fleet.Status) any { return number(s.Connected) }},
		{"complete", "gauge", "1 if all its events were taken.", func(s *fleet.Status) any { return number(s.Complete) }},
		{"nameable", "gauge", "1 if its blocks can be named from token ids.", func(s *fleet.Status) any { return number(s.BlockTokens > 0) }},
		{"batches_total", "counter", "Batches of events taken.", func(s *fleet.Status) any { return s.Batches }},
		{"events_total", "counter", "Events taken.", func(s *fleet.Status) any { return s.Events }},
		{"gaps_total", "counter", "Gaps in the sequence of batches.", func(s *fleet.Status) any { return s.Gaps }},
		{"missed_batches_total", "counter", "Batches that did not come by themselves.", func(s *fleet.Status) any { return s.Missed }},
		{"dropped_total", "counter", "Times that all its blocks were forgotten.", func(s *fleet.Status) any { return s.Dropped }},
		{"skipped_blocks_total", "counter", "Blocks that were not kept.", func(s *fleet.Status) any { return s.Skipped }},
	} {
		name := "kvindexd_instance_" + one.name
		fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s %s\n", name, one.what, name, one.kind)
		for n := range all {
			fmt.Fprintf(w, "%s{instance=%q} %d\n", name, all[n].Name, one.value(&all[n]))
		}
	}
	const held = "kvindexd_instance_blocks"
	fmt.Fprintf(w, "# HELP %s Different blocks that it holds.\n# TYPE %s gauge\n", held, held)
	for n := range all {
		for medium, blocks := range all[n].Blocks {
			fmt.Fprintf(w, "%s{instance=%q,medium=%q} %d\n", held, all[n].Name, medium, blocks)
		}
	}
}

func number(yes bool) int {
	if yes {
		return 1
	}
	return 0
}
