// SPDX-License-Identifier: Apache-2.0

//go:build race

package llmd_test

const raceEnabled = true
