package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
	"github.com/gpuctl/gpuctl/mmio/server"
)

// broken is a host that says a little, and then something else.
type broken struct {
	gpuctlv1connect.UnimplementedSiteServiceHandler
	end func() error
}

func (b broken) Thaw(_ context.Context, _ *connect.Request[gpuctlv1.SiteSessionsRequest], out *connect.ServerStream[gpuctlv1.SiteProgress]) error {
	if err := out.Send(&gpuctlv1.SiteProgress{}); err != nil {
		return err
	}
	return b.end()
}

func (b broken) Where(context.Context, *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteWhereResponse], error) {
	return nil, b.end()
}

// A host that dies in the middle of its answer may have done what it was asked
// for, or may be there again in a moment.
func TestRemoteErrors(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func() error
		want error // nil: one that ends the step
	}{
		{"dies", func() error { panic(http.ErrAbortHandler) }, migrate.ErrUnreachable},
		{"is on its way down", func() error { return connect.NewError(connect.CodeUnavailable, errors.New("no")) }, migrate.ErrUnreachable},
		{"still does what it was asked for before", func() error { return toConnect(fmt.Errorf("part: %w", server.ErrAgain)) }, migrate.ErrUnreachable},
		{"has given it away", func() error { return connect.NewError(connect.CodeResourceExhausted, errors.New("no")) }, migrate.ErrTaken},
		{"refuses", func() error { return connect.NewError(connect.CodeInvalidArgument, errors.New("no")) }, nil},
		{"fails", func() error { return errors.New("no") }, nil},
	} {
		_, handler := gpuctlv1connect.NewSiteServiceHandler(broken{end: c.end})
		srv := httptest.NewServer(handler)
		r := &Remote{Host: "h2", Service: gpuctlv1connect.NewSiteServiceClient(srv.Client(), srv.URL)}
		thaw := r.Thaw(t.Context(), vm.VM{UUID: "u"}, "", nil, func(uint64, uint64, string) {})
		_, where := r.Where(t.Context(), vm.VM{UUID: "u"})
		for name, err := range map[string]error{"in a stream": thaw, "in a call": where} {
			for _, e := range []error{migrate.ErrUnreachable, migrate.ErrTaken} {
				if want := errors.Is(c.want, e); err == nil || errors.Is(err, e) != want {
					t.Errorf("it %s %s: %v", c.name, name, err)
				}
			}
		}
		srv.Close()
	}
}
