// SPDX-License-Identifier: Apache-2.0

package server

import (
	"strconv"

	"kvtax/kvindex/cmd/kvindexd/fleet"
)

// appendAnswer appends what the instances hold of one prompt, as JSON.
func (s *Server) appendAnswer(out []byte, holdings []fleet.Holding) []byte {
	out = append(out, `{"instances":[`...)
	for n := range holdings {
		h := &holdings[n]
		if n > 0 {
			out = append(out, ',')
		}
		out = append(append(out, `{"name":`...), s.names[n]...)
		out = appendNumber(out, `,"block_tokens":`, h.BlockTokens)
		out = appendNumber(out, `,"blocks":`, h.Blocks)
		out = appendNumber(out, `,"tokens":`, h.Blocks*h.BlockTokens)
		if h.Further > 0 {
			out = append(out, `,"medium":`...)
			out = strconv.AppendQuoteToASCII(out, s.fleet.Medium(h.Medium))
			out = appendNumber(out, `,"further_blocks":`, h.Further)
		}
		out = append(out, `,"score":`...)
		out = append(strconv.AppendFloat(out, h.Score(), 'f', -1, 64), '}')
	}
	return append(out, "]}"...)
}

func appendNumber(out []byte, name string, value int) []byte {
	return strconv.AppendInt(append(out, name...), int64(value), 10)
}
