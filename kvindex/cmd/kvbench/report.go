// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"os"

	"kvtax/kvindex/cmd/kvbench/report"
	"kvtax/kvindex/cmd/kvbench/results"
)

// reportCommand says what was measured, in a README, in a file of its own, or both.
func reportCommand(args []string) error {
	flags := flag.NewFlagSet("kvbench report", flag.ContinueOnError)
	in := flags.String("in", "results.json", "results of a run")
	readme := flags.String("readme", "", "README whose lines between the markers are replaced")
	md := flags.String("md", "", "file for the whole report")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *readme == "" && *md == "" {
		return errors.New("report: neither -readme nor -md says where to")
	}
	file, err := results.Read(*in)
	if err != nil {
		return err
	}
	if *md != "" {
		if err := results.Replace(*md, []byte(report.Whole(file))); err != nil {
			return err
		}
	}
	if *readme == "" {
		return nil
	}
	old, err := os.ReadFile(*readme)
	if err != nil {
		return err
	}
	text, err := report.Replace(string(old), report.Short(file))
	if err != nil {
		return fmt.Errorf("%s: %w", *readme, err)
	}
	return results.Replace(*readme, []byte(text))
}
