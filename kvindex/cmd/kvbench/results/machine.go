// SPDX-License-Identifier: Apache-2.0

package results

import (
	"bufio"
	"bytes"
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// Provenance is what a run was measured on, and with.
type Provenance struct {
	Date   string `json:"date"`
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	OS     string `json:"os"`
	Kernel string `json:"kernel"`
	Go     string `json:"go"`
	// Modules are the versions of those compared, by path.
	Modules map[string]string `json:"modules"`
	// Commit is the tree's, or empty if there is no git; Dirty tells that tracked files
	// differ from it.
	Commit string `json:"commit"`
	Dirty  bool   `json:"dirty"`
	Rounds int    `json:"rounds"`
	// Seed decides in which order designs take their turns in each round.
	Seed  uint64 `json:"seed"`
	Quick bool   `json:"quick"`
}

// compared are the modules whose versions matter.
var compared = []string{
	"github.com/llm-d/llm-d-kv-cache",
	"github.com/hashicorp/golang-lru/v2",
	"github.com/HdrHistogram/hdrhistogram-go",
}

// Machine returns what there is to know of this machine, of a binary, and of the
// working tree around the current folder.
func Machine(binary string) (Provenance, error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return Provenance{}, err
	}
	p := Provenance{
		Date:    time.Now().UTC().Format(time.RFC3339),
		CPU:     cpuModel(),
		Cores:   runtime.GOMAXPROCS(0),
		OS:      runtime.GOOS + "/" + runtime.GOARCH,
		Kernel:  firstLine("/proc/sys/kernel/osrelease"),
		Go:      info.GoVersion,
		Modules: map[string]string{},
	}
	for _, module := range info.Deps {
		for _, path := range compared {
			if module.Path == path {
				p.Modules[path] = module.Version
			}
		}
	}
	p.Commit, p.Dirty, err = commit()
	return p, err
}

// commit returns the tree's commit and whether tracked files differ from it. Without
// git, or outside of a tree, there is none.
func commit() (string, bool, error) {
	head, err := exec.Command("git", "rev-parse", "HEAD").Output()
	var failed *exec.ExitError
	if errors.Is(err, exec.ErrNotFound) || errors.As(err, &failed) {
		return "", false, nil
	}
	if err != nil {
		return "", false, err
	}
	changed, err := exec.Command("git", "status", "--porcelain", "--untracked-files=no").Output()
	return string(bytes.TrimSpace(head)), len(changed) > 0, err
}

// cpuModel returns the name of the processor, or "unknown".
func cpuModel() string {
	file, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if name, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

// firstLine returns a file's first line, or "unknown".
func firstLine(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return "unknown"
	}
	line, _, _ := strings.Cut(string(data), "\n")
	return line
}

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
