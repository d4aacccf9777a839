package clitest

import (
	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
)

// Compile compiles an expression over the objects of a kind, as the real service does.
// The empty one is true. It is a parameter because packages under internal import no
// other package of the project.
type Compile func(kind clusterv1.Kind, where string) (func(*clusterv1.Object) (bool, error), error)

func kindWord(k clusterv1.Kind) string { return view.Word(k) }
func roleWord(r clusterv1.Role) string { return view.Word(r) }

func (c *Cluster) filter(kind clusterv1.Kind, where string) (func(proto.Message) (bool, error), error) {
	match, err := c.compile(kind, where)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	return func(m proto.Message) (bool, error) {
		ok, err := match(envelope(m))
		if err != nil {
			return false, connect.NewError(connect.CodeInvalidArgument, err)
		}
		return ok, nil
	}, nil
}

func stateWord(s clusterv1.MigrationState) string { return view.Word(s) }
