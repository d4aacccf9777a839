package guesttest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Process is a process that uses CUDA.
type Process struct {
	PID     int
	Command string
	Memory  uint64   // bytes on each of its GPUs
	GPUs    []string // UUIDs
	Refused string   // why it can't be adopted; empty: it can
}

// Open adds a process that uses CUDA and is in no session.
func (g *Guest) Open(p Process) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.processes = append(g.processes, p)
}

// OpenWith starts a session of a process that uses CUDA and has the token in its
// environment.
func (g *Guest) OpenWith(token string, p Process) (string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	offer := g.offers[token]
	switch {
	case offer == nil:
		return "", errors.New("no such offer")
	case len(offer.GetTarget().GetDriver()) == 0:
		return "", errors.New("the offer names no GPU of NVIDIA's driver")
	}
	s := p.session()
	s.Claim, s.Target = offer.GetClaim(), offer.GetTarget()
	return g.begin(s), nil
}

// begin adds a session. g.mu is held.
func (g *Guest) begin(s *gpuctlv1.Session) string {
	g.next++
	s.Id = fmt.Sprintf("%04x", 0x1000*g.next+g.next)
	g.set(s)
	return s.Id
}

func (p Process) session() *gpuctlv1.Session {
	s := &gpuctlv1.Session{
		Pid: uint32(p.PID), Command: p.Command, State: gpuctlv1.SessionState_SESSION_STATE_RUNNING, Generation: 1,
		StartedUnixMs: time.Now().UnixMilli(), Usage: &gpuctlv1.Usage{Memory: p.Memory * uint64(len(p.GPUs))}, Engine: "driver",
		Driver: &gpuctlv1.DriverState{}, Target: &gpuctlv1.Target{Gpu: strings.Join(p.GPUs, ",")},
	}
	for _, uuid := range p.GPUs {
		gpu := &gpuctlv1.DriverGPU{Uuid: uuid, Used: p.Memory}
		s.Driver.Gpus = append(s.Driver.Gpus, gpu)
		s.Target.Driver = append(s.Target.Driver, gpu)
	}
	s.Driver.Processes = []*gpuctlv1.DriverProcess{{Pid: s.Pid, Command: s.Command, State: "running", Gpus: s.Driver.Gpus}}
	return s
}

// Adopt implements GuestService.
func (g *Guest) Adopt(_ context.Context, r *connect.Request[gpuctlv1.AdoptRequest]) (*connect.Response[gpuctlv1.AdoptResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	res := &gpuctlv1.AdoptResponse{}
	for _, s := range g.sessions {
		if s.GetEngine() == "driver" && s.GetState() != gpuctlv1.SessionState_SESSION_STATE_ENDED && (r.Msg.GetAll() || s.GetPid() == r.Msg.GetPid()) {
			res.Sessions = append(res.Sessions, s)
		}
	}
	g.processes = slices.DeleteFunc(g.processes, func(p Process) bool {
		if !r.Msg.GetAll() && p.PID != int(r.Msg.GetPid()) {
			return false
		}
		s := p.session()
		if p.Refused != "" {
			res.Refused = append(res.Refused, &gpuctlv1.AdoptRefusal{Pid: s.Pid, Command: s.Command, Reasons: []*gpuctlv1.Reason{{Code: "cuda", Message: p.Refused}}})
			return false
		}
		res.Sessions = append(res.Sessions, s)
		if r.Msg.GetLook() {
			return false
		}
		if c := r.Msg.GetClaims()[s.GetPid()]; c != nil {
			s.Claim, s.Target = c.GetClaim(), c.GetTarget()
		}
		g.begin(s)
		return true
	})
	if len(res.Sessions)+len(res.Refused) == 0 && !r.Msg.GetAll() {
		res.Refused = []*gpuctlv1.AdoptRefusal{{Pid: r.Msg.GetPid(), Reasons: []*gpuctlv1.Reason{{Code: "cuda", Message: "it does not use CUDA"}}}}
	}
	return connect.NewResponse(res), nil
}

// driverReasons is reasons for a session of CUDA: its target is of the same chip, and has
// as many GPUs.
func driverReasons(s *gpuctlv1.Session, t *gpuctlv1.Target) []*gpuctlv1.Reason {
	if len(t.GetDriver()) != len(s.GetDriver().GetGpus()) {
		return []*gpuctlv1.Reason{{Code: "driver", Message: fmt.Sprintf("the target has %d GPUs of NVIDIA's driver, the session %d", len(t.GetDriver()), len(s.GetDriver().GetGpus()))}}
	}
	for i, g := range t.GetDriver() {
		if was := s.GetTarget().GetDriver()[i].GetPciDevice(); was != 0 && g.GetPciDevice() != was {
			return []*gpuctlv1.Reason{{Code: "chip", Message: "its chip is another"}}
		}
	}
	return nil
}

// moveTo lets a session be on the target.
func moveTo(s *gpuctlv1.Session, t *gpuctlv1.Target) {
	s.Target = t
	if s.GetEngine() == "driver" {
		s.Driver = proto.CloneOf(s.GetDriver())
		s.Driver.Gpus = t.GetDriver()
	}
}
