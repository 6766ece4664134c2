// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"strings"
)

// A table is one in Markdown.
type table struct {
	columns []string
	rows    [][]string
}

func newTable(columns ...string) *table { return &table{columns: columns} }

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// write writes the table under a heading and a text, or nothing if it is empty.
func (t *table) write(out *strings.Builder, heading, text string) {
	if len(t.rows) == 0 {
		return
	}
	if heading != "" {
		fmt.Fprintf(out, "### %s\n\n", heading)
	}
	if text != "" {
		fmt.Fprintf(out, "%s\n\n", text)
	}
	line := func(cells []string) { fmt.Fprintf(out, "| %s |\n", strings.Join(cells, " | ")) }
	line(t.columns)
	fmt.Fprintf(out, "|%s\n", strings.Repeat("---|", len(t.columns)))
	for _, row := range t.rows {
		line(row)
	}
	out.WriteByte('\n')
}
