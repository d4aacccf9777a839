package carrier

import (
	"context"
	"errors"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

func (c *carrier) exportState(context.Context, *gpuctlv1.ExportRequest, *connect.ServerStream[gpuctlv1.Progress]) error {
	return connect.NewError(connect.CodeUnimplemented, errors.New("a session on a GPU of another host is not suspended to memory or a file yet: move it to a GPU of this host first"))
}

// Load implements ExecutorService.
func (k *controller) Load(context.Context, *connect.Request[gpuctlv1.LoadRequest], *connect.ServerStream[gpuctlv1.Progress]) error {
	return connect.NewError(connect.CodeUnimplemented, errors.New("a saved state is not loaded into a GPU of another host yet: resume the session on a GPU of this host first"))
}
