package session

import (
	"context"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/service"
	"github.com/gpuctl/gpuctl/guest/statestream"
)

// awayHost receives states from a bench's VM, keeps them and brings them back.
type awayHost struct {
	*bench
	state []*gpuctlv1.StateChunk // the state that it keeps

	leaves  int                                                     // it leaves after so many chunks, in either direction; 0: it does not
	keeps   func(m *gpuctlv1.StateMark)                             // changes the mark of what it says that it keeps
	refuses string                                                  // why it does not keep the state
	silent  bool                                                    // it does not confirm that it keeps the state
	changes func(all []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk // changes what it brings back
}

func newAwayHost(t *testing.T, with ...func(*Config)) *awayHost {
	return &awayHost{bench: newBench(t, with...)}
}

// client connects to the manager that exists now.
func (h *awayHost) client() (c gpuctlv1connect.GuestServiceClient, end func()) {
	_, handler := service.Handler(h.m)
	srv := httptest.NewServer(handler)
	return gpuctlv1connect.NewGuestServiceClient(srv.Client(), srv.URL), func() {
		srv.CloseClientConnections()
		srv.Close()
	}
}

// suspend does the host's part of a suspend with that id, and starts the suspend itself.
func (h *awayHost) suspend(id, failAt string) *gpuctlv1.SwapResult {
	h.t.Helper()
	c, end := h.client()
	defer end()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	began, taken := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(taken)
		select {
		case <-began:
			if !h.take(ctx, c, id) {
				cancel()
			}
		case <-ctx.Done():
		}
	}()
	first := true
	res, err := h.m.Suspend(ctx, &gpuctlv1.SuspendRequest{Session: h.id, Away: id, FailAt: failAt}, func(*gpuctlv1.Progress) {
		if first {
			first = false
			close(began)
		}
	})
	cancel()
	<-taken
	if err != nil {
		h.t.Fatal(err)
	}
	return res
}

// take receives a state. It returns false if the host left.
func (h *awayHost) take(ctx context.Context, c gpuctlv1connect.GuestServiceClient, id string) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st, err := c.TakeState(ctx, connect.NewRequest(&gpuctlv1.TakeStateRequest{Session: h.id, Id: id}))
	if err != nil {
		return true
	}
	defer func() { cancel(); _ = st.Close() }()
	var all []*gpuctlv1.StateChunk
	for st.Receive() {
		all = append(all, st.Msg())
		if h.leaves > 0 && len(all) == h.leaves {
			return false
		}
	}
	if st.Err() != nil || len(all) == 0 {
		return true
	}
	mark := all[len(all)-1].Mark
	if h.keeps != nil {
		h.keeps(mark)
	}
	if h.silent {
		return false
	}
	h.state = all
	if h.refuses != "" {
		// The operation ends with this, perhaps before the answer to it.
		_, err := c.KeptState(context.WithoutCancel(ctx), connect.NewRequest(&gpuctlv1.KeptStateRequest{Session: h.id, Mark: &gpuctlv1.StateMark{Id: id}, Refused: h.refuses}))
		if err != nil {
			h.t.Error(err)
		}
		return true
	}
	if _, err := c.KeptState(ctx, connect.NewRequest(&gpuctlv1.KeptStateRequest{Session: h.id, Mark: mark})); err != nil {
		h.t.Log(err)
	}
	return true
}

func (h *awayHost) resume(failAt string) *gpuctlv1.SwapResult {
	h.t.Helper()
	c, end := h.client()
	defer end()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	began, given := make(chan struct{}), make(chan struct{})
	id := h.session().GetAway().GetId()
	go func() {
		defer close(given)
		select {
		case <-began:
			if !h.give(ctx, c, id) {
				cancel()
			}
		case <-ctx.Done():
		}
	}()
	first := true
	res, err := h.m.Resume(ctx, &gpuctlv1.ResumeRequest{Session: h.id, Target: testTarget, FailAt: failAt}, func(*gpuctlv1.Progress) {
		if first {
			first = false
			close(began)
		}
	})
	cancel()
	<-given
	if err != nil {
		h.t.Fatal(err)
	}
	return res
}

func (h *awayHost) give(ctx context.Context, c gpuctlv1connect.GuestServiceClient, id string) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	all := slices.Clone(h.state)
	if h.changes != nil {
		all = h.changes(all)
	}
	st := c.GiveState(ctx)
	err := st.Send(&gpuctlv1.GiveStateRequest{Session: h.id, Id: id})
	for i, chunk := range all {
		if err != nil {
			break
		}
		if h.leaves > 0 && i == h.leaves {
			cancel()
			_, _ = st.CloseAndReceive()
			return false
		}
		err = st.Send(&gpuctlv1.GiveStateRequest{Chunk: chunk})
	}
	_, _ = st.CloseAndReceive()
	return true
}

func TestAwayAndBack(t *testing.T) {
	h := newAwayHost(t)
	for _, step := range []string{stepCheck, stepFreeze, stepExport, stepMark} {
		if res := h.suspend("a1", step); !res.RolledBack {
			t.Fatalf("%s: %v", step, res)
		}
		h.runsOn(1)
	}
	res := h.suspend("a2", "")
	if res.Error != "" || res.BytesFrozen == 0 {
		t.Fatal(res)
	}
	h.isSuspended(toAway)
	mark := h.session().GetAway()
	if mark.GetId() != "a2" || mark.GetSize() == 0 || len(mark.GetDigest()) != 32 {
		t.Fatal(mark)
	}
	for _, fault := range []string{stepCheck, stepStart, stepPrepare, stepLoad, stepSwitch, "kill_target@prepare", "kill_target@load", "kill_target@switch"} {
		if res := h.resume(fault); !res.RolledBack {
			t.Fatalf("%s: %v", fault, res)
		}
		h.isSuspended(toAway)
	}
	if res := h.resume(""); res.Error != "" || res.Session.GetAway() != nil {
		t.Fatal(res)
	}
	h.runsOn(h.session().Generation)
}

// The session drops its state only after the host has confirmed all of it.
func TestAwayNotKept(t *testing.T) {
	for name, c := range map[string]struct {
		with func(h *awayHost)
		says string
	}{
		"host leaves":   {func(h *awayHost) { h.leaves = 2 }, "export"},
		"keeps other":   {func(h *awayHost) { h.keeps = func(m *gpuctlv1.StateMark) { m.Digest[0] ^= 1 } }, "it is another state"},
		"keeps less":    {func(h *awayHost) { h.keeps = func(m *gpuctlv1.StateMark) { m.Size-- } }, "it is another state"},
		"refuses":       {func(h *awayHost) { h.refuses = "its disk burns" }, "the host does not keep the state: its disk burns"},
		"silent":        {func(h *awayHost) { h.silent = true }, "export"},
		"not sent":      {func(h *awayHost) { h.l.setFailure("Send", errFake) }, errFake.Error()},
		"cut off":       {func(h *awayHost) { h.l.setFailure("end of Send", errFake) }, "cut off"},
		"does not come": {func(h *awayHost) { h.leaves = 1 }, "export"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newAwayHost(t)
			c.with(h)
			res := h.suspend("a1", "")
			if !res.RolledBack || !strings.Contains(res.Error, c.says) {
				t.Fatal(res)
			}
			h.runsOn(1)
			h.leaves, h.keeps, h.silent, h.refuses = 0, nil, false, ""
			h.l.setFailure("Send", nil)
			h.l.setFailure("end of Send", nil)
			if res := h.suspend("a2", ""); res.Error != "" {
				t.Fatal(res)
			}
			h.isSuspended(toAway)
		})
	}
}

// An executor that dies while its state is sent has lost it: the host has kept nothing.
func TestAwaySourceDies(t *testing.T) {
	for _, step := range []string{stepFreeze, stepExport} {
		h := newAwayHost(t)
		if res := h.suspend("a1", "kill_source@"+step); res.RolledBack || res.Error == "" {
			t.Fatal(res)
		}
		if s := h.session(); s.State != lost {
			t.Errorf("%s: %v", step, s)
		}
	}
	// After the host has confirmed the state, the source is not needed any more.
	h := newAwayHost(t)
	if res := h.suspend("a1", "kill_source@retire"); res.Error != "" {
		t.Fatal(res)
	}
	h.isSuspended(toAway)
}

// The session runs only if what comes back is what was sent.
func TestAwayComesBackOtherwise(t *testing.T) {
	for name, change := range map[string]func(all []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk{
		"truncated": func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { return a[:len(a)-1] },
		"nothing":   func([]*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { return nil },
		"shorter":   func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { return slices.Delete(a, 1, 2) },
		"reordered": func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { a[0], a[1] = a[1], a[0]; return a },
		"corrupted": func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk {
			a[1] = &gpuctlv1.StateChunk{Data: []byte("xxxx")}
			return a
		},
		"stale": func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk {
			other := fakeChunks("content of another time")
			other[len(other)-1].Mark.Id = a[len(a)-1].Mark.Id
			return other
		},
		"of another id": func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk {
			m := a[len(a)-1].Mark
			a[len(a)-1] = &gpuctlv1.StateChunk{Mark: &gpuctlv1.StateMark{Id: "a0", Size: m.Size, Digest: m.Digest}}
			return a
		},
		"no chunk": func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { return slices.Insert(a, 1, nil) },
		"too much": func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { return append(slices.Clone(a[:len(a)-1]), a...) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newAwayHost(t)
			if res := h.suspend("a1", ""); res.Error != "" {
				t.Fatal(res)
			}
			h.changes = change
			if res := h.resume(""); !res.RolledBack {
				t.Fatal(res)
			}
			h.isSuspended(toAway)
			h.changes, h.leaves = nil, 2
			if res := h.resume(""); !res.RolledBack {
				t.Fatalf("the host left: %v", res)
			}
			h.isSuspended(toAway)
			h.leaves = 0
			if res := h.resume(""); res.Error != "" {
				t.Fatal(res)
			}
			h.runsOn(h.session().Generation)
		})
	}
}

// gpuguest dies at each step, and the next one finds out where the state is.
func TestAwayNextManager(t *testing.T) {
	for _, step := range []string{stepCheck, stepFreeze, stepExport, stepMark, stepRetire} {
		t.Run("suspend/"+step, func(t *testing.T) {
			h := newAwayHost(t)
			h.restart(func() { h.suspend("a1", "kill_self@"+step) })
			if step != stepMark && step != stepRetire {
				h.runsOn(1)
				return
			}
			h.isSuspended(toAway)
			if res := h.resume(""); res.Error != "" {
				t.Fatal(res)
			}
			h.runsOn(2)
		})
	}
	for _, step := range stepNames(kindResume) {
		t.Run("resume/"+step, func(t *testing.T) {
			h := newAwayHost(t)
			h.suspend("a1", "")
			h.restart(func() { h.resume("kill_self@" + step) })
			if step == stepSwitch || step == stepDiscard {
				h.runsOn(2)
				if m := h.session().GetAway(); m != nil {
					t.Errorf("it runs, and its state is still away: %v", m)
				}
				return
			}
			h.isSuspended(toAway)
			res := h.resume("")
			if res.Error != "" {
				t.Fatal(res)
			}
			h.runsOn(res.Session.Generation)
		})
	}
}

// A call for an operation that does not exist, or is of another state, is refused.
func TestAwayWithoutOperation(t *testing.T) {
	h := newAwayHost(t)
	c, end := h.client()
	defer end()
	ctx := t.Context()
	refused := func(what string, err error, code connect.Code) {
		t.Helper()
		if connect.CodeOf(err) != code {
			t.Errorf("%s: %v", what, err)
		}
	}
	take := func(session, id string) error {
		st, err := c.TakeState(ctx, connect.NewRequest(&gpuctlv1.TakeStateRequest{Session: session, Id: id}))
		if err != nil {
			return err
		}
		defer st.Close()
		st.Receive()
		return st.Err()
	}
	refused("take", take(h.id, "a1"), connect.CodeFailedPrecondition)
	refused("take of none", take("s-x", "a1"), connect.CodeNotFound)
	_, err := c.KeptState(ctx, connect.NewRequest(&gpuctlv1.KeptStateRequest{Session: h.id, Mark: &gpuctlv1.StateMark{Id: "a1"}}))
	refused("kept", err, connect.CodeFailedPrecondition)
	st := c.GiveState(ctx)
	_ = st.Send(&gpuctlv1.GiveStateRequest{Session: h.id, Id: "a1"})
	_, err = st.CloseAndReceive()
	refused("give", err, connect.CodeFailedPrecondition)
	_, err = c.GiveState(ctx).CloseAndReceive()
	refused("give nothing", err, connect.CodeInvalidArgument)
	for _, r := range []*gpuctlv1.SuspendRequest{{Away: "a", File: "/x"}, {Away: strings.Repeat("a", statestream.MaxID+1)}} {
		r.Session = h.id
		_, err := h.m.Suspend(ctx, r, h.sink)
		refused("suspend", err, connect.CodeInvalidArgument)
	}
	h.runsOn(1)
	// A path with that name is a file.
	if isFile(toAway) || !isFile("/away") {
		t.Error("names")
	}
}
