package guesttest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

const cudaMagic = 0x41445543

// OpenCUDA says at the application socket that this process uses the GPUs with these
// UUIDs, until the connection is closed. The real gpuguest sees that by itself. With a
// token it is in a session at once, as one that gpuctl run has started; else it can be
// adopted.
func OpenCUDA(socket, token string, uuids []string) (net.Conn, error) {
	c, err := net.Dial("unix", socket)
	if err != nil {
		return nil, err
	}
	text := strings.Join(uuids, ",")
	hello := make([]byte, helloSize)
	binary.LittleEndian.PutUint32(hello, cudaMagic)
	binary.LittleEndian.PutUint32(hello[4:], uint32(len(text)))
	binary.LittleEndian.PutUint32(hello[8:], uint32(os.Getpid()))
	copy(hello[16:], token)
	answer := make([]byte, 1)
	if _, err = c.Write(append(hello, text...)); err == nil {
		_, err = io.ReadFull(c, answer)
	}
	if err == nil && answer[0] != 0 {
		err = errors.New("no CUDA-capable device is detected")
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// serveCUDA serves a process that uses CUDA.
func (g *Guest) serveCUDA(c net.Conn, hello []byte) {
	text := make([]byte, min(4096, binary.LittleEndian.Uint32(hello[4:])))
	if _, err := io.ReadFull(c, text); err != nil {
		return
	}
	p := Process{PID: int(binary.LittleEndian.Uint32(hello[8:])), Memory: 1 << 30}
	command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.PID))
	p.Command = strings.TrimSpace(string(bytes.ReplaceAll(command, []byte{0}, []byte{' '})))
	for uuid := range strings.SplitSeq(string(text), ",") {
		if uuid != "" {
			p.GPUs = append(p.GPUs, uuid)
		}
	}
	status := byte(0)
	if token := string(bytes.TrimRight(hello[16:], "\x00")); len(p.GPUs) == 0 {
		status = 1
	} else if token == "" {
		g.Open(p)
	} else if _, err := g.OpenWith(token, p); err != nil {
		status = 1
	}
	if _, err := c.Write([]byte{status}); err == nil {
		_, _ = io.Copy(io.Discard, c)
	}
	g.mu.Lock()
	var ended []string
	for id, s := range g.sessions {
		if int(s.GetPid()) == p.PID {
			ended = append(ended, id)
		}
	}
	g.processes = slices.DeleteFunc(g.processes, func(o Process) bool { return o.PID == p.PID })
	g.mu.Unlock()
	for _, id := range ended {
		g.End(id)
	}
}

// Process is a process that uses CUDA.
type Process struct {
	PID     int
	Start   uint64 // clock ticks since boot
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

// Swapped gives the pid of a process to another one, which began at start, after the next
// look.
func (g *Guest) Swapped(pid int, start uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.swapped == nil {
		g.swapped = map[int]uint64{}
	}
	g.swapped[pid] = start
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
	s.Driver.Processes = []*gpuctlv1.DriverProcess{{Pid: s.Pid, Start: p.Start, Command: s.Command, State: "running", Gpus: s.Driver.Gpus}}
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
		if start, ok := g.swapped[p.PID]; ok {
			p.Start = start
		}
		if c := r.Msg.GetClaims()[s.GetPid()]; c != nil {
			if only := c.GetOnly(); len(only) > 0 && only[s.GetPid()] != p.Start {
				res.Sessions = res.Sessions[:len(res.Sessions)-1]
				res.Refused = append(res.Refused, &gpuctlv1.AdoptRefusal{Pid: s.Pid, Reasons: []*gpuctlv1.Reason{{Code: "ended", Message: "it is another process"}}})
				return false
			}
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
