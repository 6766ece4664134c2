// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

// An address is where to listen.
type address struct {
	network string // "unix" or "tcp"
	where   string
}

func (s *settings) addAddress(text string) error {
	if path, ok := strings.CutPrefix(text, "unix://"); ok && path != "" {
		s.listen = append(s.listen, address{"unix", path})
		return nil
	}
	where, ok := strings.CutPrefix(text, "tcp://")
	if _, _, err := net.SplitHostPort(where); !ok || err != nil {
		return fmt.Errorf("unix:///PATH or tcp://HOST:PORT is needed, not %q", text)
	}
	s.listen = append(s.listen, address{"tcp", where})
	return nil
}

// String is the address as a client needs it.
func (a address) String(listener net.Listener) string {
	if a.network == "unix" {
		return "unix://" + a.where
	}
	return "tcp://" + listener.Addr().String()
}

// listen listens; on TCP with TLS, if there is a configuration for it.
func (a address) listen(config *tls.Config) (net.Listener, error) {
	if a.network == "unix" {
		a.removeStale()
	}
	listener, err := net.Listen(a.network, a.where)
	if err != nil || config == nil || a.network == "unix" {
		return listener, err
	}
	return tls.NewListener(listener, config), nil
}

// removeStale removes a socket that a killed process has left: nobody answers there.
func (a address) removeStale() {
	info, err := os.Stat(a.where)
	if err != nil || info.Mode()&os.ModeSocket == 0 {
		return
	}
	conn, err := net.DialTimeout(a.network, a.where, time.Second)
	if err == nil {
		conn.Close()
		return
	}
	os.Remove(a.where)
}
