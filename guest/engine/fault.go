package engine

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrInjected is the failure that fail_at requests.
var ErrInjected = errors.New("injected fault")

// Fault is one injected failure. "STEP" makes the step fail after its work is done.
// "kill_source@STEP" and "kill_target@STEP" kill an executor just before the step's work.
// "kill_self@STEP" kills gpuguest after it. Two steps differ. The success of the switch
// step can't be undone, so there STEP and kill_self take effect between the store of the
// owner word and the activation of the target. In the mark step, STEP takes effect before
// the mark is written.
type Fault struct {
	victim string // source, target or self; empty: the step fails
	step   string
}

// ParseFault reads an injected failure of an operation with these steps. An empty one is none.
func ParseFault(s string, allowed bool, steps []string) (Fault, error) {
	if s == "" {
		return Fault{}, nil
	}
	if !allowed {
		return Fault{}, errors.New("fault injection needs GPUCTL_FAULTS=1 in gpuguest's environment")
	}
	f := Fault{step: s}
	if verb, at, ok := strings.Cut(s, "@"); ok {
		f.step = at
		switch verb {
		case "kill_source", "kill_target", "kill_self":
			f.victim = strings.TrimPrefix(verb, "kill_")
		default:
			return Fault{}, fmt.Errorf("unknown fault %q", s)
		}
	}
	for _, name := range steps {
		if name == f.step {
			return f, nil
		}
	}
	return Fault{}, fmt.Errorf("fault at unknown step %q; steps are %s", f.step, strings.Join(steps, ", "))
}

// Victim returns which process is to be killed before the step's work: source, target, or
// none.
func (f Fault) Victim(step string) string {
	if f.step != step || f.victim == "self" {
		return ""
	}
	return f.victim
}

// Fail returns the injected failure of a step after its work, or nil.
func (f Fault) Fail(step string) error {
	if f.step == step && f.victim == "" {
		return ErrInjected
	}
	return nil
}

// Deadly reports whether gpuguest is to die at the step.
func (f Fault) Deadly(step string) bool { return f.step == step && f.victim == "self" }

// KillSelf ends this process with SIGKILL, so that no cleanup runs.
func KillSelf() {
	_ = unix.Kill(unix.Getpid(), unix.SIGKILL)
	select {}
}
