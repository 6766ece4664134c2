// SPDX-License-Identifier: Apache-2.0

package report

import (
	"errors"
	"strings"
)

const (
	beginMarker = "<!-- kvbench:begin -->\n"
	endMarker   = "<!-- kvbench:end -->"
)

// Replace returns a README with another text between the markers.
func Replace(readme, text string) (string, error) {
	before, rest, hasBegin := strings.Cut(readme, beginMarker)
	_, after, hasEnd := strings.Cut(rest, endMarker)
	if !hasBegin || !hasEnd {
		return "", errors.New("no lines <!-- kvbench:begin --> and <!-- kvbench:end --> in it: put them where the figures belong")
	}
	return before + beginMarker + text + endMarker + after, nil
}
