// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"syscall"
	"time"
)

const deadline = time.Minute

// served is the kvindexd that is measured, and a connection to it.
type served struct {
	process *exec.Cmd
	conn    net.Conn
	reader  *bufio.Reader
}

func start(l *load, folder string, fleet *publishers) (*served, error) {
	socket := folder + "/socket"
	process := exec.Command(l.Program, "-listen", "unix://"+socket, "-hash-seed", hashSeed)
	for n, one := range fleet.all {
		process.Args = append(process.Args, "-instance", fmt.Sprintf("i%d=%s,%s", n, one.events, one.replay))
	}
	process.Stderr = os.Stderr
	process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := process.Start(); err != nil {
		return nil, err
	}
	s := &served{process: process}
	for end := time.Now().Add(deadline); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			s.conn, s.reader = conn, bufio.NewReader(conn)
			return s, nil
		}
	}
	s.stop()
	return nil, errors.New("kvindexd does not listen")
}

// settle waits until all that was published has been taken.
func (s *served) settle(fleet *publishers) error {
	for end := time.Now().Add(deadline); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		answer, err := s.ask([]byte("GET /healthz HTTP/1.1\r\nHost: kvindexd\r\n\r\n"))
		if err != nil {
			return err
		}
		var found struct {
			Instances []struct {
				Connected bool
				NextBatch int `json:"next_batch"`
			}
		}
		if err := json.Unmarshal(answer, &found); err != nil {
			return err
		}
		there := 0
		for n, one := range found.Instances {
			if one.Connected && one.NextBatch == len(fleet.all[n].batches) {
				there++
			}
		}
		if there == len(fleet.all) {
			return nil
		}
	}
	return errors.New("kvindexd does not take all events")
}

// ask sends a request as it is, and returns the answer's body.
func (s *served) ask(request []byte) ([]byte, error) {
	if _, err := s.conn.Write(request); err != nil {
		return nil, err
	}
	answer, err := http.ReadResponse(s.reader, nil)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", answer.Status, body)
	}
	return body, err
}

// timed is ask, a moment later, and the time it took.
func (s *served) timed(request []byte) ([]byte, time.Duration, error) {
	time.Sleep(time.Millisecond) // as requests come to a router
	began := time.Now()
	answer, err := s.ask(request)
	return answer, time.Since(began), err
}

// peakRSSMiB is what the process has taken at most until now.
func (s *served) peakRSSMiB() float64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.process.Process.Pid))
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(status) {
		var kib float64
		if n, _ := fmt.Sscanf(string(line), "VmHWM: %f kB", &kib); n == 1 {
			return kib / 1024
		}
	}
	return 0
}

func (s *served) stop() {
	s.process.Process.Signal(syscall.SIGTERM)
	s.process.Wait()
}
