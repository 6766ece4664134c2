// SPDX-License-Identifier: Apache-2.0

// Kvbench compares kvindex with the concurrent radix tree of the crate dynamo-kv-router, in
// turn and by the same load.
//
//	kvbench run -peer PROGRAM -out FILE    measures both sides
//	kvbench report -in FILE -readme FILE   writes the tables into a README
//	kvbench trial KIND name=value ...      measures one thing of kvindex, for run
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

const usage = "usage: kvbench run|report|trial ..."

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := command(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "kvbench:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		return errors.New(usage)
	}
	switch args[0] {
	case "run":
		return runCommand(ctx, args[1:], stderr)
	case "report":
		return reportCommand(args[1:], stderr)
	case "trial":
		return trialCommand(args[1:], stdout)
	}
	return fmt.Errorf("no command is named %q\n%s", args[0], usage)
}

func runCommand(ctx context.Context, args []string, stderr io.Writer) error {
	flags := flag.NewFlagSet("kvbench run", flag.ContinueOnError)
	flags.SetOutput(stderr)
	peer := flags.String("peer", "", "program built from peer/")
	out := flags.String("out", "results.json", "file for the results")
	rounds := flags.Int("rounds", 5, "how often each trial is run")
	quick := flags.Bool("quick", false, "one short round, to see that everything works")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *peer == "" {
		return errors.New("run: -peer is needed")
	}
	own, err := os.Executable()
	if err != nil {
		return err
	}
	run := &run{programs: [2]string{own, *peer}, rounds: *rounds, more: fullArguments, progress: stderr}
	if *quick {
		run.rounds, run.more = 1, quickArguments
	}
	return run.all(ctx, func(file results) error {
		data, err := json.MarshalIndent(file, "", " ")
		if err != nil {
			return err
		}
		return os.WriteFile(*out, append(data, '\n'), 0o666)
	})
}

func reportCommand(args []string, stderr io.Writer) error {
	flags := flag.NewFlagSet("kvbench report", flag.ContinueOnError)
	flags.SetOutput(stderr)
	in := flags.String("in", "results.json", "results of a run")
	readme := flags.String("readme", "README.md", "file whose lines between the markers are replaced")
	if err := flags.Parse(args); err != nil {
		return err
	}
	data, err := os.ReadFile(*in)
	if err != nil {
		return err
	}
	var file results
	if err := json.Unmarshal(data, &file); err != nil {
		return fmt.Errorf("%s: %w", *in, err)
	}
	text, err := os.ReadFile(*readme)
	if err != nil {
		return err
	}
	before, rest, found := strings.Cut(string(text), beginMarker)
	_, after, ended := strings.Cut(rest, endMarker)
	if !found || !ended {
		return fmt.Errorf("%s has no lines %s and %s", *readme, beginMarker, endMarker)
	}
	return os.WriteFile(*readme, []byte(before+beginMarker+report(file)+endMarker+after), 0o666)
}

func trialCommand(args []string, stdout io.Writer) error {
	if len(args) == 0 || trials[args[0]] == nil {
		return fmt.Errorf("trial: no such kind: %q", args)
	}
	a, err := parseArguments(args[1:])
	if err != nil {
		return err
	}
	r, err := trials[args[0]](a)
	if err != nil {
		return err
	}
	return json.NewEncoder(stdout).Encode(r)
}
