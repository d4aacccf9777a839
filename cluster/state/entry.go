package state

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

const format = 1

// ErrFormat means that bytes are not a log entry of this program.
var ErrFormat = errors.New("not a log entry")

// ErrUnknownCommand means that this version does not know the command of an entry. Policy
// says what to do then.
type ErrUnknownCommand struct {
	Policy  clusterv1.UnknownPolicy
	Version uint32 // version that the command needs
}

func (e *ErrUnknownCommand) Error() string {
	return fmt.Sprintf("command of protocol %d is not known here, where the highest is %d", e.Version, Protocol)
}

// Encode encodes a log entry: a byte for the format, a byte for the policy, and the
// command.
func Encode(c *clusterv1.Command) ([]byte, error) {
	b := []byte{format, byte(policy(c))}
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(b, c)
	if err != nil {
		return nil, fmt.Errorf("encode command %s: %w", c.GetId(), err)
	}
	return b, nil
}

// VersionOf returns the lowest protocol version that knows everything in a command.
func VersionOf(c *clusterv1.Command) uint32 {
	for _, choice := range append(c.GetPutClaim().GetChoices(), c.GetAssign().GetChoices()...) {
		if choice.GetKind() == clusterv1.VGPUKind_VGPU_KIND_MEDIATED {
			return ProtocolMediated
		}
	}
	for _, g := range c.GetReportHost().GetGpus() {
		if g.GetServer() != "" {
			return ProtocolService
		}
	}
	if m := c.GetPutMigration().GetMigration().GetMachine(); m.GetFarGpu() != "" || len(m.GetParts()) > 0 {
		return ProtocolLive
	}
	claim := c.GetPutClaim().GetClaim()
	if c.GetSetQueue() != nil || c.GetReportLinks() != nil || claim.GetHome() != "" || claim.GetRemote() != clusterv1.Remote_REMOTE_UNSPECIFIED {
		return ProtocolRemote
	}
	identity := c.GetPutIdentity().GetIdentity()
	if use := c.GetUseJoinToken(); use != nil {
		identity = use.GetIdentity()
	}
	if identity.GetEnrolment() != "" {
		return ProtocolEnrolments
	}
	return 1
}

// policy returns what a host does that does not know the command. Notes and progress of
// migrations may be skipped: no other command depends on them.
func policy(c *clusterv1.Command) clusterv1.UnknownPolicy {
	if _, ok := c.GetOp().(*clusterv1.Command_Note); ok {
		return clusterv1.UnknownPolicy_UNKNOWN_POLICY_SKIP
	}
	return clusterv1.UnknownPolicy_UNKNOWN_POLICY_STOP
}

// Decode decodes a log entry. The error wraps ErrFormat or is an *ErrUnknownCommand.
func Decode(data []byte) (*clusterv1.Command, error) {
	if len(data) < 2 {
		return nil, fmt.Errorf("%w: %d bytes", ErrFormat, len(data))
	}
	if data[0] != format {
		return nil, fmt.Errorf("%w: its format is %d, not %d", ErrFormat, data[0], format)
	}
	p := clusterv1.UnknownPolicy(data[1])
	switch p {
	case clusterv1.UnknownPolicy_UNKNOWN_POLICY_STOP, clusterv1.UnknownPolicy_UNKNOWN_POLICY_SKIP:
	default:
		return nil, fmt.Errorf("%w: policy %d", ErrFormat, data[1])
	}
	c := &clusterv1.Command{}
	if err := proto.Unmarshal(data[2:], c); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	if c.GetVersion() > Protocol || c.GetOp() == nil && len(c.ProtoReflect().GetUnknown()) > 0 {
		return nil, &ErrUnknownCommand{Policy: p, Version: c.GetVersion()}
	}
	return c, nil
}
