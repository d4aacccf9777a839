package excerpt

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestOf(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		in   string
		most int
		want string
	}{
		{"", 10, ""},
		{"as it is", 8, "as it is"},
		{"one too many", 11, "one too …"},
		{"ab€€", 7, "ab…"}, // no part of a character
		{"a\xd8b", 10, "a?b"},
		{strings.Repeat("\xd8", 20), 10, "?"},
		{strings.Repeat("x\xd8", 20), 10, "x?x?x?x…"},
	} {
		got := Of(x.in, x.most)
		if got != x.want || len(got) > x.most || !utf8.ValidString(got) {
			t.Errorf("%q in %d bytes: %q (%d bytes), want %q", x.in, x.most, got, len(got), x.want)
		}
	}
}

func TestLine(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		in   string
		most int
		want string
	}{
		{" NVIDIA\tA100\n\x1b[1m ", 20, "NVIDIAA100[1m"},
		{"a\xd8b\ufffdc\x7f", 20, "abc"},
		{"ab€", 4, "ab"}, // no part of a character
		{"abcd  efgh", 6, "abcd"},
		{"", 6, ""},
	} {
		if got := Line(x.in, x.most); got != x.want {
			t.Errorf("%q in %d bytes: %q, want %q", x.in, x.most, got, x.want)
		}
	}
}
