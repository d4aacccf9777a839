// Package reason makes the reason of an error available as data: a code, the object that
// it is about, and what to do next. One table has, for each code, the Connect code,
// gpuctl's exit status, and whether the call may be repeated. docs/errors.md is generated
// from it.
//
// Code that refuses something adds a reason to its error:
//
//	reason.Errorf(reason.NotFound, "there is no host %q", name).On("host", name).Do("gpuctl get hosts lists them")
//
// Handlers return it with [Coded], which makes a Connect error with the reason as a
// detail. [Of] returns the reason again, in servers and clients. No code decides by an
// error's text.
package reason

import (
	"slices"

	"connectrpc.com/connect"

	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

// Code is the code of a reason. Its meaning never changes, because programs depend on it.
type Code string

// Codes, by what they are about. [Table] has their meanings.
const (
	Invalid        Code = "INVALID"
	Ambiguous      Code = "AMBIGUOUS"
	TokenMalformed Code = "TOKEN_MALFORMED" //nolint:gosec // a name

	NotFound Code = "NOT_FOUND"
	Exists   Code = "ALREADY_EXISTS"

	Refused            Code = "REFUSED"
	Busy               Code = "BUSY"
	NotJoined          Code = "NOT_JOINED"
	NotInCluster       Code = "NOT_IN_CLUSTER"
	HasCluster         Code = "HAS_CLUSTER"
	LogStopped         Code = "LOG_STOPPED"
	HostTooOld         Code = "HOST_TOO_OLD"
	MigrationOver      Code = "MIGRATION_OVER"
	MigrationCommitted Code = "MIGRATION_COMMITTED"
	MigrationNotHeld   Code = "MIGRATION_NOT_HELD"
	Locked             Code = "VM_LOCKED"
	LockManagerDown    Code = "LOCK_MANAGER_DOWN"

	NoCapacity   Code = "NO_CAPACITY"
	TooManyCalls Code = "TOO_MANY_CALLS"

	Stale Code = "STALE"

	Denied        Code = "DENIED"
	RoleTooLow    Code = "ROLE_TOO_LOW"
	LocalOnly     Code = "LOCAL_ONLY"
	HostsOnly     Code = "HOSTS_ONLY"
	NotForHosts   Code = "NOT_FOR_HOSTS"
	TokenRejected Code = "TOKEN_REJECTED"

	Unauthenticated     Code = "UNAUTHENTICATED"
	CertificateRejected Code = "CERTIFICATE_REJECTED"
	Revoked             Code = "REVOKED"

	Unavailable         Code = "UNAVAILABLE"
	NoLeader            Code = "NO_LEADER"
	NotLeader           Code = "NOT_LEADER"
	OutcomeUnknown      Code = "OUTCOME_UNKNOWN"
	Contended           Code = "CONTENDED"
	NotReady            Code = "NOT_READY"
	HostDown            Code = "HOST_DOWN"
	Stopping            Code = "STOPPING"
	MigrationNotDriven  Code = "MIGRATION_NOT_DRIVEN"
	TooManyFromStranger Code = "TOO_MANY_FROM_STRANGER"

	SessionsLost Code = "SESSIONS_LOST"

	TimedOut      Code = "TIMED_OUT"
	Canceled      Code = "CANCELED"
	Unimplemented Code = "UNIMPLEMENTED"
	Internal      Code = "INTERNAL"
)

// ExitUnavailable is gpuctl's exit status if nobody answers, or there is no leader.
const ExitUnavailable = 4

// Entry is what Table has for a code.
type Entry struct {
	Code    Code
	Connect connect.Code
	Exit    int    // gpuctl's exit status
	Retry   bool   // nothing was done, and the call may be repeated
	Next    string // what to do next, unless the error says it more precisely
	Doc     string // when it is used
}

const (
	lookAround = "gpuctl cluster status says which hosts answer, and gpuctl get --stale reads without them"
	askForRole = "an administrator can give you a token: gpuctl cluster token create --role ROLE"
	startAnew  = "start the applications anew, from their own last results"
	enrol      = "enrol first: gpuctl cluster login TOKEN"
	enrolAnew  = "enrol anew: gpuctl cluster login TOKEN"
)

// Table returns all codes. The first entry with a Connect code is used for errors that
// have that Connect code and no reason.
func Table() []Entry {
	const failed, use, refused, gone = cmdutil.Failed, cmdutil.BadUse, cmdutil.Refused, ExitUnavailable
	return []Entry{
		{Invalid, connect.CodeInvalidArgument, use, false, "", "what was asked for makes no sense"},
		{Ambiguous, connect.CodeInvalidArgument, use, false, "", "a name can mean several objects"},
		{TokenMalformed, connect.CodeInvalidArgument, use, false, "gpuctl cluster token create prints one", "what was shown is no token"},

		{NotFound, connect.CodeNotFound, failed, false, "", "there is no such object"},
		{Exists, connect.CodeAlreadyExists, failed, false, "", "there is such an object, and it is another one"},

		{Refused, connect.CodeFailedPrecondition, refused, false, "", "something is against it, which the message names; nothing was touched"},
		{Busy, connect.CodeFailedPrecondition, refused, false, "", "something else is under way with the object, or has just changed it"},
		{NotJoined, connect.CodeFailedPrecondition, failed, false, "make a cluster with gpuctl cluster init, or enter one with gpuctl cluster join TOKEN", "the host is in no cluster"},
		{NotInCluster, connect.CodeFailedPrecondition, failed, false, "make a cluster with gpuctl cluster init, or enter one with gpuctl cluster join TOKEN", "the host's log is of no cluster: it has not joined, or was removed"},
		{HasCluster, connect.CodeFailedPrecondition, refused, false, "", "the host has state of a cluster already"},
		{LogStopped, connect.CodeFailedPrecondition, refused, false, "upgrade that host", "the host met an entry of the log that it must not apply"},
		{HostTooOld, connect.CodeFailedPrecondition, refused, false, "upgrade the hosts; gpuctl cluster status shows the protocol in force", "a host is too old for the command"},
		{MigrationOver, connect.CodeFailedPrecondition, refused, false, "", "a migration has ended"},
		{MigrationCommitted, connect.CodeFailedPrecondition, refused, false, "", "a migration is past the point where it can be undone"},
		{MigrationNotHeld, connect.CodeFailedPrecondition, refused, false, "", "a migration does not wait for a word of the operator's"},
		{Locked, connect.CodeFailedPrecondition, refused, false, "gpuctl vms says where it runs", "libvirt's lock manager does not let a VM run on the host: another one has its disks, mostly the same VM on another host"},
		{LockManagerDown, connect.CodeFailedPrecondition, refused, false, "systemctl start virtlockd.socket on that host", "libvirt's lock manager does not serve on the host, so no VM can be started, resumed or received there"},

		{NoCapacity, connect.CodeResourceExhausted, refused, false, "", "no free GPU meets it, or it has just been taken"},
		{TooManyCalls, connect.CodeResourceExhausted, refused, false, "wait until one has ended", "the caller has as many calls under way as it may"},

		{Stale, connect.CodeAborted, failed, false, "it changed in the meantime: look again, then repeat", "it was decided on what is not so any more"},

		{Denied, connect.CodePermissionDenied, failed, false, askForRole, "the caller may not do that"},
		{RoleTooLow, connect.CodePermissionDenied, failed, false, askForRole, "the caller's role is too low"},
		{LocalOnly, connect.CodePermissionDenied, failed, false, "run it on the host itself", "only who is on the host may call it"},
		{HostsOnly, connect.CodePermissionDenied, failed, false, "use the commands of gpuctl", "only hosts may call it"},
		{NotForHosts, connect.CodePermissionDenied, failed, false, "ask as a user", "hosts may not call it"},
		{TokenRejected, connect.CodePermissionDenied, failed, false, askForRole, "a token was used, deleted, has expired, is for another name, or never was"},

		{Unauthenticated, connect.CodeUnauthenticated, failed, false, enrol, "the caller shows no certificate"},
		{CertificateRejected, connect.CodeUnauthenticated, failed, false, enrolAnew, "the caller's certificate is not good"},
		{Revoked, connect.CodeUnauthenticated, failed, false, enrolAnew, "the caller was removed from the cluster, or its certificate was revoked"},

		{Unavailable, connect.CodeUnavailable, gone, false, lookAround, "nobody answers, or not now"},
		{NoLeader, connect.CodeUnavailable, gone, true, lookAround, "no host leads the cluster, and nothing was done"},
		{NotLeader, connect.CodeUnavailable, gone, true, lookAround, "the host does not lead the cluster, and nothing was done; the object is the leader's address, if it is known"},
		{OutcomeUnknown, connect.CodeUnavailable, gone, false, lookAround, "an answer was lost: it may have been done"},
		{Contended, connect.CodeUnavailable, gone, false, "try again", "others took each GPU that was chosen"},
		{NotReady, connect.CodeUnavailable, gone, false, "ask again in a moment, or ask another host", "the host has not caught up with the cluster yet"},
		{HostDown, connect.CodeUnavailable, gone, false, lookAround, "the host that it is about is down"},
		{Stopping, connect.CodeUnavailable, gone, false, "start hostd again", "hostd is stopping"},
		{MigrationNotDriven, connect.CodeUnavailable, gone, false, "try again in a moment", "no host drives a migration just now"},
		{TooManyFromStranger, connect.CodeUnavailable, gone, false, "wait until one has ended", "the address of a caller without a certificate has as many calls under way as it may"},

		{SessionsLost, connect.CodeDataLoss, failed, false, startAnew, "what applications had on a GPU exists no longer: their OpenCL or CUDA calls fail"},

		{TimedOut, connect.CodeDeadlineExceeded, gone, false, "", "there was no answer in time; it may have been done"},
		{Canceled, connect.CodeCanceled, failed, false, "", "the caller has left"},
		{Unimplemented, connect.CodeUnimplemented, failed, false, "", "this hostd does not know the call"},
		{Internal, connect.CodeInternal, failed, false, "", "hostd failed; its log says more"},
	}
}

// entry returns the entry of a code. ok is false if this version does not know the code.
func entry(code Code) (e Entry, ok bool) {
	all := Table()
	if i := slices.IndexFunc(all, func(e Entry) bool { return e.Code == code }); i >= 0 {
		return all[i], true
	}
	return Entry{}, false
}

// generic returns the reason of an error that has a Connect code and no reason.
func generic(code connect.Code) Entry {
	for _, e := range Table() {
		if e.Connect == code {
			return e
		}
	}
	e, _ := entry(Internal)
	return e
}
