// Package suggest finds the names that a user with a typing error may have meant.
package suggest

import (
	"fmt"
	"slices"
	"strings"
)

// Names returns the names that are similar to the given one or contain it, the nearest
// first, at most three.
func Names(name string, among []string) []string {
	type match struct {
		name     string
		distance int
	}
	var found []match
	want := strings.ToLower(name)
	most := max(1, len(want)/3)
	for _, n := range among {
		have := strings.ToLower(n)
		d := most + 1
		// Names whose lengths differ more are not near. Somebody may ask for one of a megabyte.
		if max(len(have)-len(want), len(want)-len(have)) <= most {
			d = distance(want, have)
		}
		if len(want) > 2 && strings.Contains(have, want) {
			d = min(d, 1)
		}
		if d <= most {
			found = append(found, match{n, d})
		}
	}
	slices.SortStableFunc(found, func(a, b match) int { return a.distance - b.distance })
	var out []string
	for _, m := range found[:min(3, len(found))] {
		out = append(out, m.name)
	}
	return out
}

// Hint returns " (did you mean a or b?)", or nothing.
func Hint(name string, among []string) string {
	names := Names(name, among)
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf(" (did you mean %s?)", strings.Join(names, " or "))
}

// distance returns the number of single-byte edits between a and b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		last := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := last
			if a[i] != b[j] {
				cost++
			}
			last = row[j+1]
			row[j+1] = min(cost, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
