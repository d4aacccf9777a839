package fabric

import "testing"

func TestLoopback(t *testing.T) {
	for at, want := range map[string]string{
		":7651": "localhost:7651", "0.0.0.0:7651": "localhost:7651", "[::]:7651": "localhost:7651",
		"192.0.2.1:7651": "192.0.2.1:7651", "[2001:db8::1]:7651": "[2001:db8::1]:7651",
	} {
		if got := loopback(at); got != want {
			t.Errorf("%s: %s, not %s", at, got, want)
		}
	}
}
