package access

import (
	"errors"
	"fmt"
	"strings"

	"connectrpc.com/connect"

	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// decide says why a caller may not call a procedure; nil: it may.
func decide(table map[string]Rule, c Caller, procedure string) *connect.Error {
	name := procedure[strings.LastIndexByte(procedure, '/')+1:]
	refuse := func(code connect.Code, format string, args ...any) *connect.Error {
		return connect.NewError(code, fmt.Errorf(name+": "+format, args...))
	}
	rule, known := table[procedure]
	switch {
	case !known:
		return connect.NewError(connect.CodePermissionDenied, fmt.Errorf("procedure %.200q is not one that anybody may call", procedure))
	case rule.Kinds&c.Kind != 0:
	case errors.Is(c.Problem, ErrNotReady):
		return refuse(connect.CodeUnavailable, "%w; ask again in a moment, or ask another host", c.Problem)
	case c.Kind == Anonymous && rule.Kinds == Local:
		return refuse(connect.CodePermissionDenied, "only on the host itself: run it there")
	case c.Kind == Anonymous && c.Problem != nil && !errors.Is(c.Problem, pki.ErrNoCertificate):
		err := refuse(connect.CodeUnauthenticated, "%w", c.Problem)
		if errors.Is(c.Problem, pki.ErrRevoked) {
			err.Meta().Set(reason.Header, reason.Revoked)
		}
		return err
	case c.Kind == Anonymous:
		return refuse(connect.CodeUnauthenticated, "it needs a certificate of this cluster: ask an administrator for a token (gpuctl cluster token) and join with it")
	case rule.Kinds == Local:
		return refuse(connect.CodePermissionDenied, "%s: only on the host itself: run it there", c)
	case c.Kind == Local:
		return refuse(connect.CodePermissionDenied, "%s: not on this socket: hosts call it on each other, and on the cluster's port", c)
	case c.Kind == User:
		return refuse(connect.CodePermissionDenied, "%s: for hosts alone; use the commands of gpuctl", c)
	default:
		return refuse(connect.CodePermissionDenied, "%s: not for hosts; ask as a user", c)
	}
	if c.Kind&(Local|User) == 0 || c.Role >= rule.Role && rule.Kinds&c.Kind != 0 {
		return nil
	}
	advice := "ask an administrator for a token with that role"
	if c.Kind == Local {
		advice = "run it as root, or have the user put into a group that hostd's configuration names"
	}
	return refuse(connect.CodePermissionDenied, "%s has role %s and it needs %s: %s", c, roleName(c.Role), roleName(rule.Role), advice)
}
