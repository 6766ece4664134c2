// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import "syscall"

// diesWithParent is for Linux only: elsewhere a trial outlives a parent that is killed,
// by some seconds.
func diesWithParent() *syscall.SysProcAttr { return nil }
