// Package excerpt limits texts of others, like errors of libraries and names in documents,
// to a size that can be passed on.
package excerpt

import "strings"

const more = "…"

// Of returns s if it has at most most bytes. Otherwise it returns the beginning of s with
// an ellipsis, in at most most bytes. The result is valid UTF-8 without zero bytes, which the
// cluster's log refuses: each run of bytes that are not becomes a question mark, and each zero byte.
func Of(s string, most int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "?"), "\x00", "?")
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:max(0, most-len(more))], "") + more
}

// Line returns s as one printable line of at most most bytes: without control characters,
// bytes that are not UTF-8, and spaces at its ends.
func Line(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\ufffd' {
			return -1
		}
		return r
	}, strings.ToValidUTF8(s, ""))
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "")
	}
	return strings.TrimSpace(s)
}
