package cli

import (
	"errors"
	"fmt"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

// rehearseMachine lets all CUDA programs of a VM go through what a migration does with them, and
// back. Each has its line; the exit status is that of a session's rehearsal, of all together.
func (a *app) rehearseMachine(cmd *cobra.Command, req *gpuctlv1.MachineRehearseRequest) error {
	for _, name := range []string{"to", "plan", "deadline", "no-wait", "force-cold", "live", "wait"} {
		if cmd.Flags().Changed(name) {
			return cmdutil.Usage(fmt.Errorf("--rehearse moves nothing, and refuses before it touches anything: leave out --%s", name))
		}
	}
	c, err := a.connectMigrations()
	if err != nil {
		return err
	}
	stream, err := c.Rehearse(cmd.Context(), connect.NewRequest(req))
	if err != nil {
		return a.adviseMachine(cmd.Context(), req.GetHost(), req.GetMachine(), err)
	}
	defer stream.Close()
	var failed []error
	code := cmdutil.Refused
	for {
		_, last, err := a.followOne(stream)
		if err != nil {
			return errors.Join(append(failed, a.adviseMachine(cmd.Context(), req.GetHost(), req.GetMachine(), err))...)
		}
		if last == nil {
			break
		}
		if err := a.judge("rehearsal", "it can't be moved as it is; it goes on as it was", "it goes on as it was", last); err != nil {
			failed = append(failed, err)
			if cmdutil.Code(err) != cmdutil.Refused {
				code = cmdutil.Failed
			}
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return cmdutil.WithCode(errors.Join(failed...), code)
}
