// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
)

const schema = "kvtax.instances/1"

// An instance is one vLLM engine, as a line of instances.json has it.
type instance struct {
	Name        string `json:"name"`
	Events      string `json:"kv_events"`
	BlockTokens int    `json:"block_tokens"`
}

// readInstances reads a file as fleet.launch writes it. All instances must have blocks of
// one size, as llm-d's index has.
func readInstances(file string) ([]instance, error) {
	if file == "" {
		return nil, errors.New("-instances FILE is needed")
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var found struct {
		Schema    string
		Instances []instance
	}
	if err := json.Unmarshal(data, &found); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if found.Schema != schema || len(found.Instances) == 0 {
		return nil, fmt.Errorf("%s: its schema is %q with %d instances, %s with at least one is needed",
			file, found.Schema, len(found.Instances), schema)
	}
	for n := range found.Instances {
		one := &found.Instances[n]
		if one.BlockTokens == 0 {
			one.BlockTokens = 16 // what a file may leave out
		}
		if one.Events == "" {
			return nil, fmt.Errorf("%s: %s has no `kv_events`: start it with --kv-events-config, and say where", file, one.Name)
		}
		if first := found.Instances[0]; one.BlockTokens != first.BlockTokens {
			return nil, fmt.Errorf("%s: blocks of %d tokens at %s and of %d at %s: llm-d's index has one size",
				file, first.BlockTokens, first.Name, one.BlockTokens, one.Name)
		}
	}
	return found.Instances, nil
}
