package state

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

func sessionAbout(s *clusterv1.Session) []string {
	about := []string{ref(kindHost, s.GetHost())}
	if s.GetClaim() != "" {
		about = append(about, ref(kindClaim, s.GetClaim()))
	}
	for _, g := range s.GetGpus() {
		if g != "" && len(about) < maxAbout {
			about = append(about, ref(kindGPU, g))
		}
	}
	slices.Sort(about)
	return slices.Compact(about)
}

func (t *tx) reportSessions(op *clusterv1.ReportSessions) *clusterv1.Result {
	host := op.GetHost()
	if t.Host(host) == nil {
		return result(notFound, "host %.300q: there is none", host)
	}
	listed := make(map[string]bool, len(op.GetSessions()))
	for _, s := range op.GetSessions() {
		if err := checkSession(host, s); err != nil {
			return result(invalid, "%v", err)
		}
		if listed[s.GetId()] {
			return result(invalid, "session %s: listed twice", s.GetId())
		}
		listed[s.GetId()] = true
	}
	for _, s := range op.GetSessions() {
		t.reportSession(host, s)
	}
	if op.GetAll() {
		for s := range t.SessionsOfHost(host) {
			if !listed[s.GetId()] {
				t.del(s)
				t.event(kindSession, s.GetId(), "SessionEnded", "its host no longer has it", sessionAbout(s)...)
			}
		}
	}
	return done()
}

func (t *tx) reportSession(host string, said *clusterv1.Session) {
	old := t.Session(said.GetId())
	s := proto.Clone(said).(*clusterv1.Session)
	s.Host, s.Revision = host, old.GetRevision()
	if s.GetState() == gpuctlv1.SessionState_SESSION_STATE_ENDED {
		if old != nil {
			t.del(old)
			t.event(kindSession, s.GetId(), "SessionEnded", s.GetMessage(), sessionAbout(old)...)
		}
		return
	}
	if old != nil && proto.Equal(old, s) {
		return
	}
	t.put(s)
	if old == nil {
		t.event(kindSession, s.GetId(), "SessionStarted", s.GetCommand(), sessionAbout(s)...)
		return
	}
	if !slices.Equal(old.GetGpus(), s.GetGpus()) {
		t.event(kindSession, s.GetId(), "SessionMoved", "to "+s.GetModel(), sessionAbout(s)...)
	}
	if old.GetState() != s.GetState() {
		t.event(kindSession, s.GetId(), "SessionState", word(s.GetState(), "SESSION_STATE_")+because(s.GetMessage()), sessionAbout(s)...)
	}
}

// over reports whether a migration has ended.
func over(m *clusterv1.Migration) bool {
	switch m.GetState() {
	case clusterv1.MigrationState_MIGRATION_STATE_DONE, clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK, clusterv1.MigrationState_MIGRATION_STATE_FAILED:
		return true
	default:
		return false
	}
}

func (t *tx) putMigration(op *clusterv1.PutMigration) *clusterv1.Result {
	if err := checkMigration(op.GetMigration()); err != nil {
		return result(invalid, "%v", err)
	}
	m := proto.Clone(op.GetMigration()).(*clusterv1.Migration)
	if m.GetState() == clusterv1.MigrationState_MIGRATION_STATE_UNSPECIFIED {
		m.State = clusterv1.MigrationState_MIGRATION_STATE_RUNNING
	}
	old := t.Migration(m.GetId())
	switch {
	case old == nil && op.GetTakeOver():
		return result(notFound, "migration %s: there is none to take over", m.GetId())
	case old == nil && m.GetToken() != 0:
		return result(stale, "migration %s: there is none with token %d", m.GetId(), m.GetToken())
	case old == nil && t.version >= ProtocolMoves && t.moving(m.GetMachine().GetUuid()) != "":
		// Who began that one was told that it may have failed, and began another one.
		return result(refused, "migration %s of VM %s is not over", t.moving(m.GetMachine().GetUuid()), m.GetMachine().GetName())
	case old == nil:
		m.Token = t.index
		if m.GetStartedUnixMs() == 0 {
			m.StartedUnixMs = t.now
		}
		return t.storeMigration(nil, m)
	case op.GetTakeOver() && m.GetToken() == 0:
		if over(old) {
			return migrated(result(refused, "migration %s: is over", m.GetId()), old)
		}
		next := shallow(old)
		next.Driver, next.Token = m.GetDriver(), t.index
		t.put(next)
		t.event(kindMigration, next.GetId(), "MigrationTakenOver", "by "+next.GetDriver()+" from "+old.GetDriver(), migrationAbout(next)...)
		return migrated(done(), next)
	case m.GetToken() != old.GetToken():
		return migrated(result(stale, "migration %s: its token is %d, not %d: host %s drives it", m.GetId(), old.GetToken(), m.GetToken(), old.GetDriver()), old)
	case m.GetDriver() != old.GetDriver():
		return migrated(result(stale, "migration %s: host %s drives it, not %s", m.GetId(), old.GetDriver(), m.GetDriver()), old)
	}
	// Who sends a record again that may be written already does not know its revision.
	late := t.version >= ProtocolMoves && m.GetRevision() != old.GetRevision()
	m.StartedUnixMs, m.Revision = old.GetStartedUnixMs(), old.GetRevision()
	if over(m) && m.GetEndedUnixMs() == 0 {
		m.EndedUnixMs = old.GetEndedUnixMs()
		if m.GetEndedUnixMs() == 0 {
			m.EndedUnixMs = t.now
		}
	}
	switch {
	case proto.Equal(old, m):
		return migrated(done(), old)
	case over(old):
		return migrated(result(refused, "migration %s: is over", m.GetId()), old)
	case late:
		return migrated(result(stale, "migration %s: this record of it comes late: it was changed meanwhile", m.GetId()), old)
	case m.GetVerb() != old.GetVerb() || m.GetObject() != old.GetObject() || m.GetClaim() != old.GetClaim():
		return migrated(result(invalid, "migration %s: is to %s %s; another verb, object or claim takes another id", m.GetId(), old.GetVerb(), old.GetObject()), old)
	}
	return t.storeMigration(old, m)
}

// moving returns the migration of a VM that is not over, or "".
func (t *tx) moving(uuid string) string {
	for m := range t.Migrations() {
		if uuid != "" && m.GetMachine().GetUuid() == uuid && !over(m) {
			return m.GetId()
		}
	}
	return ""
}

func migrated(r *clusterv1.Result, m *clusterv1.Migration) *clusterv1.Result {
	r.Migration = m
	return r
}

func migrationAbout(m *clusterv1.Migration) []string {
	about := []string{ref(kindHost, m.GetDriver())}
	if m.GetClaim() != "" {
		about = append(about, ref(kindClaim, m.GetClaim()))
	}
	if m.GetObject() != "" {
		about = append(about, ref(kindSession, m.GetObject()))
	}
	return about
}

func (t *tx) storeMigration(old, m *clusterv1.Migration) *clusterv1.Result {
	if over(m) && m.GetEndedUnixMs() == 0 {
		m.EndedUnixMs = t.now
	}
	t.put(m)
	about := migrationAbout(m)
	if old == nil {
		t.event(kindMigration, m.GetId(), "MigrationStarted", cut(fmt.Sprintf("%s %s from %s to %s", m.GetVerb(), m.GetObject(), m.GetFrom(), m.GetTo()), maxText), about...)
	}
	if m.GetStep() != old.GetStep() {
		t.event(kindMigration, m.GetId(), "MigrationStep", m.GetStep(), about...)
	}
	if m.GetState() != old.GetState() {
		typ := ""
		switch m.GetState() {
		case clusterv1.MigrationState_MIGRATION_STATE_DONE:
			typ = "MigrationDone"
		case clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK:
			typ = "MigrationRolledBack"
		case clusterv1.MigrationState_MIGRATION_STATE_FAILED:
			typ = "MigrationFailed"
		case clusterv1.MigrationState_MIGRATION_STATE_HELD:
			typ = "MigrationHeld"
		default:
			if old != nil {
				typ = "MigrationResumed"
			}
		}
		if typ != "" {
			t.event(kindMigration, m.GetId(), typ, m.GetMessage(), about...)
		}
	}
	if over(m) {
		if t.ended++; t.ended > maxEnded {
			t.drop(tableMigrations, byEnded)
			t.ended--
		}
	}
	return migrated(done(), m)
}

func (t *tx) putJoinToken(op *clusterv1.PutJoinToken) *clusterv1.Result {
	if err := checkJoinToken(op.GetToken()); err != nil {
		return result(invalid, "%v", err)
	}
	j := proto.Clone(op.GetToken()).(*clusterv1.JoinToken)
	if j.GetCreatedBy() == "" {
		j.CreatedBy = t.actor
	}
	if old := t.JoinToken(j.GetId()); old != nil {
		j.Revision = old.GetRevision()
		if proto.Equal(old, j) {
			return done()
		}
		return result(exists, "join token %s: exists already", j.GetId())
	}
	n := 0
	for range t.JoinTokens() {
		n++
	}
	if n >= maxJoinTokens {
		return result(refused, "join token %s: there are %d already; delete some", j.GetId(), n)
	}
	t.put(j)
	t.event(0, j.GetId(), "TokenCreated", roleName(j.GetRole())+because(j.GetName()))
	return done()
}

func roleName(r clusterv1.Role) string { return word(r, "ROLE_") }

// word returns an enum's value as people write it.
func word(e fmt.Stringer, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(e.String(), prefix))
}

func (t *tx) useJoinToken(op *clusterv1.UseJoinToken) *clusterv1.Result {
	if err := checkIdentity(op.GetIdentity()); err != nil {
		return result(invalid, "%v", err)
	}
	j, i := t.JoinToken(op.GetId()), op.GetIdentity()
	name := i.GetId()
	if i.GetRole() == clusterv1.Role_ROLE_HOST {
		name = i.GetHost()
	}
	switch {
	case j == nil:
		return result(notFound, "join token %.300q: it was used or deleted, or never was", op.GetId())
	case j.GetRole() != i.GetRole():
		return result(refused, "join token %s: is for a %s, not a %s", j.GetId(), roleName(j.GetRole()), roleName(i.GetRole()))
	case j.GetName() != "" && j.GetName() != name:
		return result(refused, "join token %s: is for %s, not %s", j.GetId(), j.GetName(), name)
	case t.Identity(i.GetId()) != nil:
		return result(exists, "identity %s: exists already; revoke it first", i.GetId())
	}
	if r := t.nameTaken(i); r != nil {
		return r
	}
	t.del(j)
	t.event(0, j.GetId(), "TokenUsed", "by "+name)
	t.storeIdentity(nil, i)
	return done()
}

// nameTaken refuses a second identity with the name of another host.
func (t *tx) nameTaken(i *clusterv1.Identity) *clusterv1.Result {
	if i.GetRole() != clusterv1.Role_ROLE_HOST {
		return nil
	}
	if h := t.Host(i.GetHost()); h != nil && h.GetId() != i.GetId() {
		return result(exists, "host %s: the name belongs to the host with id %s, not %s", h.GetName(), h.GetId(), i.GetId())
	}
	for other := range scan[clusterv1.Identity](t.reader, tableIdentities, byObject, i.GetHost()) {
		if other.GetId() != i.GetId() {
			return result(exists, "host %s: the name belongs to identity %s, not %s", i.GetHost(), other.GetId(), i.GetId())
		}
	}
	return nil
}

func (t *tx) deleteJoinToken(op *clusterv1.DeleteJoinToken) *clusterv1.Result {
	j := t.JoinToken(op.GetId())
	if j == nil {
		return result(notFound, "join token %.300q: there is none", op.GetId())
	}
	t.del(j)
	t.event(0, j.GetId(), "TokenDeleted", "")
	return done()
}

func (t *tx) putIdentity(op *clusterv1.PutIdentity) *clusterv1.Result {
	if err := checkIdentity(op.GetIdentity()); err != nil {
		return result(invalid, "%v", err)
	}
	if r := t.nameTaken(op.GetIdentity()); r != nil {
		return r
	}
	t.storeIdentity(t.Identity(op.GetIdentity().GetId()), op.GetIdentity())
	return done()
}

func (t *tx) storeIdentity(old, said *clusterv1.Identity) {
	i := proto.Clone(said).(*clusterv1.Identity)
	i.CreatedUnixMs, i.Revision = t.now, old.GetRevision()
	if old != nil {
		i.CreatedUnixMs = old.GetCreatedUnixMs()
	}
	if old != nil && proto.Equal(old, i) {
		return
	}
	t.put(i)
	typ := "IdentityChanged"
	if old == nil {
		typ = "IdentityCreated"
	}
	var about []string
	if i.GetHost() != "" {
		about = append(about, ref(kindHost, i.GetHost()))
	}
	t.event(0, i.GetId(), typ, roleName(i.GetRole()), about...)
}

func (t *tx) deleteIdentity(op *clusterv1.DeleteIdentity) *clusterv1.Result {
	i := t.Identity(op.GetId())
	if i == nil {
		return result(notFound, "identity %.300q: there is none", op.GetId())
	}
	t.del(i)
	t.event(0, i.GetId(), "IdentityRevoked", roleName(i.GetRole()))
	return done()
}

func (t *tx) note(op *clusterv1.Note) *clusterv1.Result {
	e := op.GetEvent()
	if err := checkNote(e); err != nil {
		return result(invalid, "%v", err)
	}
	typ := e.GetType()
	if typ == "" {
		typ = "Note"
	}
	t.event(e.GetKind(), e.GetObject(), typ, e.GetMessage(), slices.Clone(e.GetAbout())...)
	return done()
}
