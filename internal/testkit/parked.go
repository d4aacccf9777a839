package testkit

import (
	"fmt"
	"runtime"
	"strings"
)

// Parked waits until at least n goroutines of this process stand still in a
// function: they wait for somebody, in it or in what it calls. It is for tests
// of what becomes of who waits, where the code under test has no reason to tell
// that somebody does. The function is named as in a stack's trace, from the last
// part of its package's path on: "vchan.(*Conn).Read". The goroutines of tests
// that run at the same time count, too.
func Parked(t T, function string, n int) {
	if h, ok := t.(interface{ Helper() }); ok {
		h.Helper()
	}
	Until(t, fmt.Sprintf("%d goroutines that wait in %s", n, function), func() error {
		got := parked(stacks(), function)
		return Want(got >= n, got)
	})
}

// stacks is the trace of every goroutine.
func stacks() string {
	for b := make([]byte, 1<<18); ; b = make([]byte, 2*len(b)) {
		if n := runtime.Stack(b, true); n < len(b) {
			return string(b[:n])
		}
	}
}

// parked counts the goroutines of a trace that wait in a function.
func parked(trace, function string) (n int) {
	for one := range strings.SplitSeq(trace, "\n\n") {
		head, calls, _ := strings.Cut(one, "\n")
		_, state, _ := strings.Cut(head, "[")
		state, _, _ = strings.Cut(strings.TrimSuffix(state, "]:"), ",")
		switch state {
		case "running", "runnable", "":
			continue
		}
		for call := range strings.SplitSeq(calls, "\n") {
			if strings.HasPrefix(call, "\t") || strings.HasPrefix(call, "created by ") {
				continue
			}
			if call = call[strings.LastIndex(call[:max(0, strings.LastIndexByte(call, '('))], "/")+1:]; strings.HasPrefix(call, function+"(") {
				n++
				break
			}
		}
	}
	return n
}
