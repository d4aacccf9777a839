package access

import (
	"errors"
	"strings"

	"connectrpc.com/connect"

	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// decide returns why a caller must not call a procedure, or nil if it may.
func decide(table map[string]Rule, c Caller, procedure string) *connect.Error {
	name := procedure[strings.LastIndexByte(procedure, '/')+1:]
	refuse := func(code reason.Code, next, format string, args ...any) *connect.Error {
		return reason.Refuse(reason.Errorf(code, name+": "+format, args...).On("procedure", procedure).Do(next))
	}
	rule, known := table[procedure]
	switch {
	case !known:
		return refuse(reason.Denied, "", "procedure %.200q is not one that anybody may call", procedure)
	case rule.Kinds&c.Kind != 0:
	case errors.Is(c.Problem, ErrNotReady):
		return refuse(reason.NotReady, "ask again in a moment, or ask another host", "%w", c.Problem)
	case c.Kind == Anonymous && rule.Kinds == Local:
		return refuse(reason.LocalOnly, "run it there", "only on the host itself")
	case c.Kind == Anonymous && c.Problem != nil && !errors.Is(c.Problem, pki.ErrNoCertificate):
		code := reason.CertificateRejected
		if errors.Is(c.Problem, pki.ErrRevoked) {
			code = reason.Revoked
		}
		return refuse(code, "", "%w", c.Problem)
	case c.Kind == Anonymous:
		return refuse(reason.Unauthenticated, "ask an administrator for a token (gpuctl cluster token) and join with it", "it needs a certificate of this cluster")
	case rule.Kinds == Local:
		return refuse(reason.LocalOnly, "run it there", "%s: only on the host itself", c)
	case c.Kind == Local:
		return refuse(reason.HostsOnly, "", "%s: not on this socket: hosts call it on each other, and on the cluster's port", c)
	case c.Kind == User:
		return refuse(reason.HostsOnly, "use the commands of gpuctl", "%s: for hosts alone", c)
	default:
		return refuse(reason.NotForHosts, "ask as a user", "%s: not for hosts", c)
	}
	if c.Kind&(Local|User) == 0 || c.Role >= rule.Role && rule.Kinds&c.Kind != 0 {
		return nil
	}
	advice := "ask an administrator for a token with that role"
	if c.Kind == Local {
		advice = "run it as root, or have the user put into a group that hostd's configuration names"
	}
	return refuse(reason.RoleTooLow, advice, "%s has role %s and it needs %s", c, roleName(c.Role), roleName(rule.Role))
}
