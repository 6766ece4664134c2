// SPDX-License-Identifier: Apache-2.0

// Kvbench compares indexes of KV-cache blocks by what a router has to wait for.
//
//	kvbench run -bin DIR -traces DIR -out FILE    measures everything
//	kvbench report -in FILE -readme FILE -md FILE says what was measured
//	kvbench trial KIND -design NAME ...           measures one thing, for run
//	kvbench profile -name NAME                    says where upstream's lookups spend their time
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

const usage = `usage: kvbench run|report|trial|profile [flags]; each tells its flags with -h`

func main() {
	if err := command(os.Args[1:], os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "kvbench:", err)
		os.Exit(1)
	}
}

func command(args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		return fmt.Errorf("no command\n%s", usage)
	}
	switch args[0] {
	case "run":
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
		defer stop()
		return runCommand(ctx, args[1:], stderr)
	case "report":
		return reportCommand(args[1:])
	case "trial":
		return trialCommand(args[1:], stdout)
	case "profile":
		return profileCommand(args[1:], stdout)
	}
	return fmt.Errorf("no command is named %q\n%s", args[0], usage)
}
