// SPDX-License-Identifier: Apache-2.0

package results

import (
	"fmt"
	"os"
	"strings"
)

// userHz is the unit of /proc/stat: Linux has 100 ticks a second for user space.
const userHz = 100

// LoadAverage returns the machine's over the last minute, or -1 if it is not known.
func LoadAverage() float64 {
	var load float64
	if _, err := fmt.Sscan(firstLine("/proc/loadavg"), &load); err != nil {
		return -1
	}
	return load
}

// BusySeconds returns the processor time that all processes of this machine have had
// since it started, with what other machines on the same host took from it, or -1 if it
// is not known.
func BusySeconds() float64 {
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return -1
	}
	line, _, _ := strings.Cut(string(data), "\n")
	var user, nice, system, idle, ioWait, irq, softIRQ, steal float64
	_, err = fmt.Sscanf(line, "cpu %f %f %f %f %f %f %f %f",
		&user, &nice, &system, &idle, &ioWait, &irq, &softIRQ, &steal)
	if err != nil {
		return -1
	}
	return (user + nice + system + irq + softIRQ + steal) / userHz
}
