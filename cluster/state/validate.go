package state

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Bounds of input. Everything that is stored is within them, so a snapshot can always be
// written and read.
const (
	maxCommand       = 4 << 20 // bytes of an encoded command
	maxName          = 255     // bytes
	maxText          = 4096    // bytes of any string
	maxBlob          = 64 << 10
	maxList          = 4096 // elements of any list or map
	maxLabels        = 64
	maxNICs          = 64
	maxGPUsPerHost   = 256
	maxProfiles      = 64
	maxKinds         = 8
	maxLendAddresses = 8
	maxInstances     = 1024
	maxGPUsPerClaim  = 64
	maxHostsNot      = 256
	maxSteps         = 256
	maxConcerned     = 4096 // sessions and candidates of a migration
	maxAbout         = 64
	maxJoinTokens    = 10_000
	maxMemory        = 1 << 60 // bytes; sums of these do not overflow
	maxTTL           = 24 * 60 * 60 * 1000
	secretHashLength = 32
)

// bounded refuses commands that are too large, contain strings that protobuf cannot
// encode, or lists with nil elements.
func bounded(c *clusterv1.Command) error {
	if err := boundedMessage(c.ProtoReflect()); err != nil {
		return err
	}
	if n := proto.Size(c); n > maxCommand {
		return fmt.Errorf("command of %d bytes: at most %d", n, maxCommand)
	}
	return nil
}

// boundedMessage checks the fields in the order of their numbers, so that every host
// reports the same one of several errors.
func boundedMessage(m protoreflect.Message) error {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if !m.Has(fd) {
			continue
		}
		if err := boundedField(fd, m.Get(fd)); err != nil {
			return err
		}
	}
	return nil
}

func boundedField(fd protoreflect.FieldDescriptor, v protoreflect.Value) error {
	switch {
	case fd.IsMap():
		if n := v.Map().Len(); n > maxList {
			return fmt.Errorf("%s: %d entries: at most %d", fd.Name(), n, maxList)
		}
		var err error
		v.Map().Range(func(k protoreflect.MapKey, value protoreflect.Value) bool {
			if boundedValue(fd.MapKey(), k.Value()) != nil || boundedValue(fd.MapValue(), value) != nil {
				err = fmt.Errorf("%s: a key or value is too long or no text", fd.Name())
			}
			return err == nil
		})
		return err
	case fd.IsList():
		list := v.List()
		if list.Len() > maxList {
			return fmt.Errorf("%s: %d elements: at most %d", fd.Name(), list.Len(), maxList)
		}
		if k := fd.Kind(); k != protoreflect.StringKind && k != protoreflect.BytesKind && k != protoreflect.MessageKind {
			return nil
		}
		for i := range list.Len() {
			if err := boundedValue(fd, list.Get(i)); err != nil {
				return err
			}
		}
		return nil
	}
	return boundedValue(fd, v)
}

func boundedValue(fd protoreflect.FieldDescriptor, v protoreflect.Value) error {
	switch fd.Kind() {
	case protoreflect.StringKind:
		if err := plain(v.String(), maxText); err != nil {
			return fmt.Errorf("%s: %w", fd.Name(), err)
		}
	case protoreflect.BytesKind:
		if n := len(v.Bytes()); n > maxBlob {
			return fmt.Errorf("%s: %d bytes: at most %d", fd.Name(), n, maxBlob)
		}
	case protoreflect.MessageKind:
		if !v.Message().IsValid() {
			return fmt.Errorf("%s: empty", fd.Name())
		}
		return boundedMessage(v.Message())
	}
	return nil
}

// plain checks that a text can be stored: UTF-8 without zero bytes, which terminate keys.
func plain(s string, most int) error {
	switch {
	case len(s) > most:
		return fmt.Errorf("%d bytes: at most %d", len(s), most)
	case !utf8.ValidString(s):
		return fmt.Errorf("not UTF-8")
	case strings.IndexByte(s, 0) >= 0:
		return fmt.Errorf("holds a zero byte")
	}
	return nil
}

// identifier checks a name that is used in other names and typed by people.
func identifier(what, s string) error {
	if s == "" {
		return fmt.Errorf("%s: empty", what)
	}
	if len(s) > maxName {
		return fmt.Errorf("%s %.32q…: %d bytes: at most %d", what, s, len(s), maxName)
	}
	for i, r := range []byte(s) {
		letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !letter && (i == 0 || strings.IndexByte("._-:@+#", r) < 0) {
			return fmt.Errorf("%s %q: has other characters than letters, digits and . _ - : @ + # or does not begin with a letter or digit", what, s)
		}
	}
	return nil
}

// title checks a name from a vendor. It may contain blanks, but no slash if it becomes a
// part of an id.
func title(what, s string, part bool) error {
	if s == "" {
		return fmt.Errorf("%s: empty", what)
	}
	if err := plain(s, maxName); err != nil {
		return fmt.Errorf("%s %.32q: %w", what, s, err)
	}
	for _, r := range s {
		if unicode.IsControl(r) || part && r == '/' {
			return fmt.Errorf("%s %q: has control characters or a slash", what, s)
		}
	}
	return nil
}

func labels(what string, m map[string]string) error {
	if len(m) > maxLabels {
		return fmt.Errorf("%s: %d labels: at most %d", what, len(m), maxLabels)
	}
	for k, v := range sorted(m) {
		if err := identifier(what+": label", strings.ReplaceAll(k, "/", ".")); err != nil {
			return err
		}
		if len(v) > maxName {
			return fmt.Errorf("%s: label %s: %d bytes: at most %d", what, k, len(v), maxName)
		}
	}
	return nil
}

func known[E interface {
	~int32
	Descriptor() protoreflect.EnumDescriptor
}](what string, e E,
) error {
	if e.Descriptor().Values().ByNumber(protoreflect.EnumNumber(e)) == nil {
		return fmt.Errorf("%s: %s %d is not known", what, e.Descriptor().Name(), int32(e))
	}
	return nil
}

func memory(what string, n uint64) error {
	if n > maxMemory {
		return fmt.Errorf("%s: %d bytes: at most %d", what, n, uint64(maxMemory))
	}
	return nil
}

// firstOf returns the first error, so that all hosts return the same one.
func firstOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func checkHost(h *clusterv1.Host) error {
	if err := firstOf(identifier("host", h.GetName()), identifier("host "+h.GetName()+": id", h.GetId())); err != nil {
		return err
	}
	what := "host " + h.GetName()
	if a := h.GetAddress(); a != "" {
		name, port, err := net.SplitHostPort(a)
		if err != nil || name == "" || len(a) > maxName {
			return fmt.Errorf("%s: address %.300q is not host:port", what, a)
		}
		if p, err := strconv.ParseUint(port, 10, 16); err != nil || p == 0 {
			return fmt.Errorf("%s: address %q: port %q is not a number from 1 to 65535", what, a, port)
		}
	}
	if n := len(h.GetNics()); n > maxNICs {
		return fmt.Errorf("%s: %d network interfaces: at most %d", what, n, maxNICs)
	}
	for _, nic := range h.GetNics() {
		if n := len(nic.GetIps()); n > maxNICs {
			return fmt.Errorf("%s: interface %s: %d addresses: at most %d", what, nic.GetName(), n, maxNICs)
		}
	}
	return nil
}

func checkGPUs(host string, gpus []*clusterv1.GPU) error {
	if n := len(gpus); n > maxGPUsPerHost {
		return fmt.Errorf("host %s: %d GPUs: at most %d", host, n, maxGPUsPerHost)
	}
	seen := make(map[string]bool, len(gpus))
	for _, g := range gpus {
		if err := identifier("host "+host+": GPU", g.GetName()); err != nil {
			return err
		}
		id := host + "/" + g.GetName()
		switch {
		case seen[id]:
			return fmt.Errorf("GPU %s: reported twice", id)
		case g.GetHost() != "" && g.GetHost() != host, g.GetId() != "" && g.GetId() != id:
			return fmt.Errorf("GPU %s: reported as GPU %q of host %q", id, g.GetId(), g.GetHost())
		}
		seen[id] = true
		if err := firstOf(
			title("GPU "+id+": model", g.GetModel(), false),
			memory("GPU "+id, g.GetLimits().GetGlobalMemory()),
			known("GPU "+id, g.GetHealth()),
			checkProfiles(id, g.GetProfiles()),
			checkKinds(id, g.GetKinds()),
			checkServer(id, g),
		); err != nil {
			return err
		}
	}
	return nil
}

// checkServer checks what is said of the service VM that owns a GPU.
func checkServer(gpu string, g *clusterv1.GPU) error {
	if g.GetServer() != "" {
		if err := title("GPU "+gpu+": server", g.GetServer(), false); err != nil {
			return err
		}
	}
	if n := len(g.GetLendAddresses()); n > maxLendAddresses || n > 0 && g.GetServer() == "" {
		return fmt.Errorf("GPU %s: %d addresses for carriers: at most %d, and of a service VM only", gpu, n, maxLendAddresses)
	}
	for _, a := range g.GetLendAddresses() {
		if at, err := netip.ParseAddrPort(a); err != nil || at.Port() == 0 {
			return fmt.Errorf("GPU %s: %.80q is not IP:PORT", gpu, a)
		}
	}
	return nil
}

func checkKinds(gpu string, kinds []string) error {
	if n := len(kinds); n > maxKinds {
		return fmt.Errorf("GPU %s: %d kinds: at most %d", gpu, n, maxKinds)
	}
	for _, k := range kinds {
		if err := title("GPU "+gpu+": kind", k, true); err != nil {
			return err
		}
	}
	return nil
}

func checkProfiles(gpu string, profiles []*clusterv1.Profile) error {
	if n := len(profiles); n > maxProfiles {
		return fmt.Errorf("GPU %s: %d profiles: at most %d", gpu, n, maxProfiles)
	}
	for i, p := range profiles {
		what := "GPU " + gpu + ": profile"
		if err := firstOf(title(what, p.GetName(), true), memory(what+" "+p.GetName(), p.GetMemory())); err != nil {
			return err
		}
		if p.GetApart() != "" {
			if err := title(what+" "+p.GetName()+": apart", p.GetApart(), false); err != nil {
				return err
			}
		}
		if p.GetMaxInstances() > maxInstances {
			return fmt.Errorf("%s %s: %d instances: at most %d", what, p.GetName(), p.GetMaxInstances(), maxInstances)
		}
		for _, other := range profiles[:i] {
			if other.GetName() == p.GetName() {
				return fmt.Errorf("%s %s: listed twice", what, p.GetName())
			}
		}
	}
	return nil
}

func checkClaim(c *clusterv1.Claim) error {
	if err := identifier("claim", c.GetId()); err != nil {
		return err
	}
	what := "claim " + c.GetId()
	if c.GetCount() > maxGPUsPerClaim {
		return fmt.Errorf("%s: %d GPUs: at most %d", what, c.GetCount(), maxGPUsPerClaim)
	}
	if c.GetPreferMemory() != 0 && c.GetPreferMemory() < c.GetMinMemory() {
		return fmt.Errorf("%s: prefers %d bytes, less than the %d that it needs", what, c.GetPreferMemory(), c.GetMinMemory())
	}
	if n := len(c.GetHostsNot()); n > maxHostsNot {
		return fmt.Errorf("%s: not on %d hosts: at most %d", what, n, maxHostsNot)
	}
	optional := func(name, s string) error {
		if s == "" {
			return nil
		}
		return identifier(what+": "+name, s)
	}
	err := firstOf(
		memory(what, c.GetMinMemory()), memory(what, c.GetPreferMemory()),
		known(what, c.GetPolicy()), known(what, c.GetUnmet()), known(what, c.GetRemote()), optional("home", c.GetHome()),
		optional("host", c.GetHost()), optional("group", c.GetGroup()), labels(what, c.GetLabels()),
	)
	if err == nil && c.GetProfile() != "" {
		err = title(what+": profile", c.GetProfile(), true)
	}
	for _, h := range c.GetHostsNot() {
		err = firstOf(err, identifier(what+": not on host", h))
	}
	return err
}

// checkChoice returns the kind of a choice, and sets the default if the choice has none.
func checkChoice(claim string, c *clusterv1.Choice) (clusterv1.VGPUKind, error) {
	what := fmt.Sprintf("claim %s: choice %.300q", claim, c.GetGpu())
	if err := firstOf(known(what, c.GetKind()), memory(what, c.GetMemory())); err != nil {
		return 0, err
	}
	kind := c.GetKind()
	if kind == clusterv1.VGPUKind_VGPU_KIND_UNSPECIFIED {
		kind = clusterv1.VGPUKind_VGPU_KIND_SHARE
		if c.GetMemory() == 0 {
			kind = clusterv1.VGPUKind_VGPU_KIND_WHOLE
		}
	}
	switch sliced := profiled(kind); {
	case sliced && c.GetProfile() == "":
		return 0, fmt.Errorf("%s: %s needs a profile", what, kind)
	case !sliced && c.GetProfile() != "":
		return 0, fmt.Errorf("%s: %s has no profile, not %q", what, kind, c.GetProfile())
	case !sliced && kind != clusterv1.VGPUKind_VGPU_KIND_WHOLE && c.GetMemory() == 0:
		return 0, fmt.Errorf("%s: %s needs an amount of memory", what, kind)
	}
	return kind, nil
}

func profiled(kind clusterv1.VGPUKind) bool {
	switch kind {
	case clusterv1.VGPUKind_VGPU_KIND_VF, clusterv1.VGPUKind_VGPU_KIND_MDEV, clusterv1.VGPUKind_VGPU_KIND_VENDOR,
		clusterv1.VGPUKind_VGPU_KIND_MEDIATED:
		return true
	default:
		return false
	}
}

func checkReservation(r *clusterv1.Reservation) error {
	if err := firstOf(
		identifier("reservation", r.GetId()),
		identifier("reservation "+r.GetId()+": owner", r.GetOwner()),
		memory("reservation "+r.GetId(), r.GetMemory()),
	); err != nil {
		return err
	}
	if r.GetTtlMs() == 0 || r.GetTtlMs() > maxTTL {
		return fmt.Errorf("reservation %s: it must expire after 1 to %d ms, not %d", r.GetId(), maxTTL, r.GetTtlMs())
	}
	return nil
}

func checkSession(host string, s *clusterv1.Session) error {
	rest, ok := strings.CutPrefix(s.GetId(), host+"/")
	if !ok || s.GetHost() != "" && s.GetHost() != host {
		return fmt.Errorf("session %.300q: not one of host %s", s.GetId(), host)
	}
	what := "session " + s.GetId()
	if err := firstOf(identifier("host "+host+": session", rest), known(what, s.GetState())); err != nil {
		return err
	}
	if s.GetState() == gpuctlv1.SessionState_SESSION_STATE_UNSPECIFIED {
		return fmt.Errorf("%s: no state", what)
	}
	if s.GetClaim() != "" {
		if err := identifier(what+": claim", s.GetClaim()); err != nil {
			return err
		}
	}
	if n := len(s.GetGpus()); n > maxGPUsPerHost {
		return fmt.Errorf("%s: %d GPUs: at most %d", what, n, maxGPUsPerHost)
	}
	return nil
}

func checkMigration(m *clusterv1.Migration) error {
	if err := identifier("migration", m.GetId()); err != nil {
		return err
	}
	what := "migration " + m.GetId()
	if n := len(m.GetDone()); n > maxSteps {
		return fmt.Errorf("%s: %d steps: at most %d", what, n, maxSteps)
	}
	if n := len(m.GetSteps()); n > 4*maxSteps {
		return fmt.Errorf("%s: %d records of steps: at most %d", what, n, 4*maxSteps)
	}
	if n := len(m.GetMachine().GetSessions()) + len(m.GetMachine().GetAway()) + len(m.GetMachine().GetCandidates()); n > maxConcerned {
		return fmt.Errorf("%s: %d sessions and candidates: at most %d", what, n, maxConcerned)
	}
	if m.GetClaim() != "" {
		if err := identifier(what+": claim", m.GetClaim()); err != nil {
			return err
		}
	}
	return firstOf(known(what, m.GetState()), identifier(what+": driver", m.GetDriver()))
}

func checkJoinToken(j *clusterv1.JoinToken) error {
	if err := identifier("join token", j.GetId()); err != nil {
		return err
	}
	what := "join token " + j.GetId()
	if n := len(j.GetSecretHash()); n != secretHashLength {
		return fmt.Errorf("%s: hash of %d bytes, not %d", what, n, secretHashLength)
	}
	if j.GetName() != "" {
		if err := identifier(what+": name", j.GetName()); err != nil {
			return err
		}
	}
	return checkRole(what, j.GetRole())
}

func checkRole(what string, r clusterv1.Role) error {
	if r == clusterv1.Role_ROLE_UNSPECIFIED {
		return fmt.Errorf("%s: no role", what)
	}
	return known(what, r)
}

func checkIdentity(i *clusterv1.Identity) error {
	if err := identifier("identity", i.GetId()); err != nil {
		return err
	}
	what := "identity " + i.GetId()
	if e := i.GetEnrolment(); e != "" {
		if err := identifier(what+": enrolment", e); err != nil {
			return err
		}
	}
	if err := checkRole(what, i.GetRole()); err != nil {
		return err
	}
	if i.GetRole() == clusterv1.Role_ROLE_HOST {
		return identifier(what+": host", i.GetHost())
	}
	if i.GetHost() != "" {
		return fmt.Errorf("%s: only hosts have a host, not a %s", what, i.GetRole())
	}
	return nil
}

func checkNote(e *clusterv1.Event) error {
	if e == nil {
		return fmt.Errorf("note: empty")
	}
	if err := firstOf(known("note", e.GetKind()), plain(e.GetObject(), 3*maxName)); err != nil {
		return err
	}
	if e.GetType() != "" {
		if err := identifier("note: type", e.GetType()); err != nil {
			return err
		}
	}
	if n := len(e.GetAbout()); n > maxAbout {
		return fmt.Errorf("note: about %d objects: at most %d", n, maxAbout)
	}
	for _, about := range e.GetAbout() {
		if err := plain(about, 3*maxName); err != nil || about == "" {
			return fmt.Errorf("note: about %.32q: too long or empty", about)
		}
	}
	return nil
}
