package sessions

import (
	"testing"
	"testing/fstest"
)

// A program whose first thread has ended computes on, and its GPU must not be given to another.
func TestHolderWhoseFirstThreadHasEndedIsAlive(t *testing.T) {
	const rest = " 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 "
	for threads, alive := range map[string]bool{"0": false, "1": false, "2": true, "10": true} {
		proc := fstest.MapFS{"7/stat": {Data: []byte("7 (a) Z" + rest + threads + " 0 77 0")}}
		if got := (holder{PID: 7, Start: 77}).alive(proc); got != alive {
			t.Errorf("%s threads: alive is %v", threads, got)
		}
	}
}
