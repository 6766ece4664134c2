// SPDX-License-Identifier: Apache-2.0

package main

import "syscall"

// diesWithParent lets the kernel kill a trial if this process ends without doing so. It
// goes by the thread that starts the trial: see runtime.LockOSThread.
func diesWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
