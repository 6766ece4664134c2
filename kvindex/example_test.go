// SPDX-License-Identifier: Apache-2.0

package kvindex_test

import (
	"fmt"

	"kvtax/kvindex"
)

// A router adds what each pod has cached, and asks how much of a prompt each holds.
func ExampleIndex_Score() {
	index, err := kvindex.New[string](kvindex.Config{Capacity: 1_000_000, MaxPodsPerKey: 64})
	if err != nil {
		panic(err)
	}
	index.Add([]uint64{11, 12, 13}, "pod-a", "pod-b")
	index.Evict(13, "pod-b")
	for _, score := range index.Score([]uint64{11, 12, 13, 14}, nil) {
		fmt.Println(score.Pod, score.Blocks)
	}
	// Unordered output:
	// pod-a 3
	// pod-b 2
}
