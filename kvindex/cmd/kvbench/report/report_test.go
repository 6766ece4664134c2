// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"

	"kvtax/kvindex/cmd/kvbench/results"
)

// run makes a file in which upstream takes some times as long as kvindex in each round.
func run(times ...float64) *results.File {
	file := &results.File{Provenance: results.Provenance{Cores: 2, Rounds: len(times)}, Planned: 2 * len(times)}
	add := func(design string, round int, us float64) {
		file.Trials = append(file.Trials, results.Trial{
			Kind: results.KindBurst, Design: design, Round: round, GOMAXPROCS: 2,
			Burst: &results.Burst{
				Readers: 64, Blocks: 263, Bursts: 20,
				Latency:               results.Quantiles{N: 1280, P50Us: us, P99Us: 2 * us, MaxUs: 3 * us},
				StatedEventsPerSecond: 2000, EventsPerSecond: 2000,
				CoverageMean: 1, CoverageMin: 1,
			},
		})
	}
	for round, factor := range times {
		scale := float64(round + 1) // rounds differ, ratios of the same round do not
		add(upstreamName, round+1, 100*factor*scale)
		add(oursName, round+1, 100*scale)
	}
	return file
}

func TestAnAimIsJudgedByRatiosOfTheSameRound(t *testing.T) {
	for _, c := range []struct {
		times []float64
		want  string
	}{
		{[]float64{60, 55, 70}, met},
		{[]float64{30, 20, 49}, missed},
		{[]float64{30, 60, 70}, undecided},
		{[]float64{60, 70}, undecided},
		{[]float64{60, 70, 80, 90, 100}, met},
	} {
		aims := aimsTable(run(c.times...))
		if row := aims.rows[0]; row[len(row)-1] != c.want {
			t.Errorf("%v: %v, want %s", c.times, row, c.want)
		}
	}
}

func TestWhatWasNotMeasuredIsUndecided(t *testing.T) {
	for _, row := range aimsTable(&results.File{}).rows {
		if row[len(row)-1] != undecided {
			t.Errorf("%v", row)
		}
	}
}

func TestARunSuspectsItsOwnNumbers(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(*results.File)
		want  string
	}{
		"slow writers":    {func(f *results.File) { f.Trials[0].Burst.EventsPerSecond = 1899 }, "95 %"},
		"coverage":        {func(f *results.File) { f.Trials[0].Burst.CoverageMin = 0.9 }, "not found whole"},
		"a stopped trial": {func(f *results.File) { f.Trials[0].Burst.Stopped = true }, "lower bounds"},
		"other work":      {func(f *results.File) { f.Trials[0].OtherCores = 0.5 }, "Other work"},
		"a failure":       {func(f *results.File) { f.Trials[0].Burst, f.Trials[0].Failure = nil, "panic" }, "failed"},
		"an interruption": {func(f *results.File) { f.Trials = f.Trials[:5] }, "interrupted after 5 of 6"},
		"few rounds":      {func(f *results.File) { f.Provenance.Rounds = 2 }, "fewer than 3 rounds"},
		"uncommitted":     {func(f *results.File) { f.Provenance.Dirty = true }, "not in the commit"},
	} {
		t.Run(name, func(t *testing.T) {
			file := run(60, 60, 60)
			if found := notes(file); len(found) != 0 {
				t.Fatalf("suspects %v", found)
			}
			c.spoil(file)
			if text := Whole(file); !strings.Contains(text, c.want) {
				t.Errorf("no word of it:\n%s", text)
			}
		})
	}
}

func TestOnlyTheBlockOfAReadmeIsReplaced(t *testing.T) {
	const before, after = "# Title\ntext\n", "\nmore\n"
	readme := before + beginMarker + "old\n" + endMarker + after
	got, err := Replace(readme, "new\n")
	if err != nil {
		t.Fatal(err)
	}
	if want := before + beginMarker + "new\n" + endMarker + after; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, without := range []string{"", beginMarker, endMarker, endMarker + "\n" + beginMarker} {
		if _, err := Replace(without, "new\n"); err == nil {
			t.Errorf("%q: no error", without)
		}
	}
}

func TestFiguresHaveThreeDigits(t *testing.T) {
	for value, want := range map[float64]string{
		0: "0", 0.02: "0.02", 1: "1", 1.234: "1.23", 12.34: "12.3", 123.4: "123", 17220: "17,220", 1234567: "1,234,567",
	} {
		if got := figure(value); got != want {
			t.Errorf("%v: %q, want %q", value, got, want)
		}
	}
}
