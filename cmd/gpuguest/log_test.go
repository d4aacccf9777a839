package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLogKeepsItsNewestLines(t *testing.T) {
	const most = 64 << 10
	path := filepath.Join(t.TempDir(), "log")
	open := func(flags int) *os.File {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|flags, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	read := func() string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	line := func(i int) string { return fmt.Sprintf("line %d of the log\n", i) }
	const lines = 20_000
	for range 2 { // the second gpuguest goes on with the file of the first
		f := open(os.O_RDWR)
		log := boundLog(f, most)
		for i := range lines {
			if n, err := log.Write([]byte(line(i))); err != nil || n != len(line(i)) {
				t.Fatal(n, err)
			}
			if fi, err := f.Stat(); err != nil || fi.Size() > most {
				t.Fatalf("line %d: %d bytes, %v", i, fi.Size(), err)
			}
		}
		got := read()
		if len(got) < most/2-100 || !strings.HasPrefix(got, "older lines were dropped") || !strings.HasSuffix(got, line(lines-2)+line(lines-1)) {
			t.Errorf("%d bytes:\n%.200s", len(got), got)
		}
		first := -1
		for i, l := range strings.Split(strings.TrimSuffix(got, "\n"), "\n")[1:] {
			var n int
			if _, err := fmt.Sscanf(l, "line %d of the log", &n); err != nil || first >= 0 && n != first+i {
				t.Fatalf("line %d is %q after %d", i, l, first)
			}
			if first < 0 {
				first = n
			}
		}
	}
	// A crash of the Go runtime is written to the same descriptor, past the writer.
	f := open(os.O_RDWR)
	log := boundLog(f, most)
	fmt.Fprint(f, "panic: x\n")
	fmt.Fprint(log, "next\n")
	if got := read(); !strings.HasSuffix(got, "panic: x\nnext\n") {
		t.Error("lines past the writer are lost")
	}
	// What is not hostd's to bound is left alone: a pipe, a file that was not opened to be
	// read.
	var pipe bytes.Buffer
	if w := boundLog(&pipe, most); w != &pipe {
		t.Error("a pipe is bounded")
	}
	if w, ok := boundLog(open(os.O_WRONLY), most).(*os.File); !ok {
		t.Error("a file of somebody else's is bounded", w)
	}
}
