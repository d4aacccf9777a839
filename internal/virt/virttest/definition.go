package virttest

import "strings"

// onDefinition executes a call about a domain's persistent definition.
func (s *Server) onDefinition(call string, d *domain, r *reader, w *writer) *refusal {
	if call == "is persistent" {
		w.flag(d.config != "")
		return nil
	}
	if d.config == "" {
		return refuse(55, "Requested operation is not valid: cannot %s transient domain", call)
	}
	switch call {
	case "autostart?":
		w.flag(d.boots)
	case "autostart":
		d.boots = r.u32() != 0
	case "undefine":
		switch keeps := r.u32() == 8; {
		case s.xen && keeps:
			return refuse(8, "invalid argument: unsupported flags (0x8) in function libxlDomainUndefineFlags")
		case !s.xen && strings.Contains(d.config, "</nvram>") && !keeps:
			return refuse(55, "Requested operation is not valid: cannot undefine domain with nvram")
		}
		d.config, d.boots = "", false
		s.emit(d, 1, 0)
		if d.state == shutOff {
			delete(s.domains, d.uuid)
		}
	}
	return nil
}

func (w *writer) flag(on bool) {
	if on {
		w.u32(1)
	} else {
		w.u32(0)
	}
}
