package session

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrInjected is the failure that fail_at requests.
var ErrInjected = errors.New("injected fault")

// fault is one injected failure. "STEP" makes the step fail after its work is done.
// "kill_source@STEP" and "kill_target@STEP" kill an executor just before the step's work.
// "kill_self@STEP" kills gpuguest after it. Two steps differ. The success of the switch
// step can't be undone, so there STEP and kill_self take effect between the store of the
// owner word and the activation of the target. In the mark step, STEP takes effect before
// the mark is written.
type fault struct {
	victim string // source, target or self; empty: the step fails
	step   string
}

func parseFault(s string, allowed bool, steps []string) (fault, error) {
	if s == "" {
		return fault{}, nil
	}
	if !allowed {
		return fault{}, errors.New("fault injection needs GPUCTL_FAULTS=1 in gpuguest's environment")
	}
	f := fault{step: s}
	if verb, at, ok := strings.Cut(s, "@"); ok {
		f.step = at
		switch verb {
		case "kill_source", "kill_target", "kill_self":
			f.victim = strings.TrimPrefix(verb, "kill_")
		default:
			return fault{}, fmt.Errorf("unknown fault %q", s)
		}
	}
	for _, name := range steps {
		if name == f.step {
			return f, nil
		}
	}
	return fault{}, fmt.Errorf("fault at unknown step %q; steps are %s", f.step, strings.Join(steps, ", "))
}

// before injects the faults that come before the step's work.
func (f fault) before(step string, source, target *executor) {
	if f.step != step {
		return
	}
	switch {
	case f.victim == "source" && source != nil:
		source.kill()
	case f.victim == "target" && target != nil:
		target.kill()
	}
}

// fail returns the injected failure of a step after its work, or nil.
func (f fault) fail(step string) error {
	if f.step == step && f.victim == "" {
		return ErrInjected
	}
	return nil
}

// deadly reports whether gpuguest is to die at the step.
func (f fault) deadly(step string) bool { return f.step == step && f.victim == "self" }

// killSelf ends this process with SIGKILL, so that no cleanup runs.
func killSelf() {
	_ = unix.Kill(unix.Getpid(), unix.SIGKILL)
	select {}
}
