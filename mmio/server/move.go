package server

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/pciconf"
)

// The moves of a part to another host. On the source a part is parked, saved and given; on
// the destination it awaits, is restored and resumed. A part is resumed on one host only
// after it was given by the other: so no two serve one VM's GPU.
const (
	opPark    = "park"
	opSave    = "save"
	opGive    = "give"
	opRestore = "restore"
	opResume  = "resume"
)

// begin returns a part for an operation that only one at a time may do, if it is in one of the
// states. The caller calls end.
func (s *Server) begin(id string, states ...State) (*part, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.parts[id]
	switch {
	case p == nil:
		return nil, fmt.Errorf("%w: %s", ErrNotFound, id)
	case p.busy:
		return nil, fmt.Errorf("part %s: %w: another operation on it has not ended", id, ErrAgain)
	case p.lost != "":
		return nil, fmt.Errorf("part %s: %w: %s", id, ErrRefused, p.lost)
	case p.state == Given && !slices.Contains(states, Given):
		return nil, fmt.Errorf("part %s: %w", id, ErrGiven)
	case !slices.Contains(states, p.state):
		return nil, fmt.Errorf("part %s: %w: it is %s", id, ErrRefused, p.state)
	}
	p.busy = true
	return p, nil
}

// end ends an operation on a part, with the state that it has then.
func (s *Server) end(p *part, state State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.busy, p.state = false, state; state != Sealed && state != Given {
		p.seal = ""
	}
}

const restEvery = time.Millisecond

// park lets no command of a part begin, and waits for the one that runs. If ctx ends before,
// the part stays parked, and it is waited for when this is repeated.
func (s *Server) park(ctx context.Context, id string) error {
	p, err := s.begin(id, Served, Parked)
	if err != nil {
		return err
	}
	defer s.end(p, Parked)
	if err := s.GPU.Pause(p.vm); err != nil {
		return fmt.Errorf("part %s: %w", id, err)
	}
	return s.rest(ctx, p)
}

// rest waits until a paused part is at rest.
func (s *Server) rest(ctx context.Context, p *part) error {
	for {
		err := s.GPU.AtRest(p.vm)
		if !errors.Is(err, mediate.ErrBusy) {
			return err
		}
		if over := wait.For(ctx, restEvery); over != nil {
			return fmt.Errorf("part %s: %w: %w", p.ID, over, err)
		}
	}
}

// give ends a part's use on this host for good: another host has its contents. If they are not
// those of the seal, the part has been resumed since.
func (s *Server) give(id, seal string) error {
	p, err := s.begin(id, Sealed, Given)
	if err != nil {
		return err
	}
	if seal != p.seal {
		s.end(p, p.state)
		return fmt.Errorf("part %s: %w: it was saved anew since", id, ErrRefused)
	}
	s.end(p, Given)
	s.Log.Info("a part was given to another host", "gpu", s.Name, "vm", p.Name)
	return nil
}

// resume has a part work whose contents are all here.
func (s *Server) resume(ctx context.Context, id string) error {
	p, err := s.begin(id, Served, Parked, Sealed)
	if err != nil {
		return err
	}
	state := p.state
	defer func() { s.end(p, state) }()
	for {
		err := s.GPU.Resume(p.vm)
		if !errors.Is(err, mediate.ErrBusy) {
			if err != nil {
				return fmt.Errorf("part %s: %w", id, err)
			}
			break
		}
		if over := wait.For(ctx, restEvery); over != nil {
			return fmt.Errorf("part %s: %w: %w", id, over, err)
		}
	}
	s.mu.Lock() // the process may be about to end, which takes the same lock
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	if p.stop == nil {
		s.serve(p, &s.router)
	}
	state = Served
	return nil
}

// stall is how long the other end of a connection may do nothing while contents are copied.
const stall = 30 * time.Second

// stalling is a connection whose other end must go on.
type stalling struct{ net.Conn }

func (c stalling) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(stall)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

func (c stalling) Write(p []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(stall)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// sendState seals a part and sends its contents behind an answer.
func (s *Server) sendState(c net.Conn, id string) {
	p, err := s.begin(id, Parked, Sealed)
	if err != nil {
		_ = reply(c, failed(err))
		return
	}
	state := p.state
	end := sync.OnceFunc(func() { s.end(p, state) })
	defer end()
	if err = s.GPU.AtRest(p.vm); err != nil {
		_ = reply(c, failed(fmt.Errorf("part %s: %w: park it first: %w", id, ErrRefused, err)))
		return
	}
	p.halt() // from here on accesses wait
	if state != Sealed {
		s.mu.Lock()
		p.seal = random.Hex(16)
		s.mu.Unlock()
	}
	state = Sealed
	if reply(c, answer{}) != nil {
		return
	}
	out := bufio.NewWriterSize(stalling{c}, maxChunk)
	w := &chunks{to: out}
	if err = s.writeState(p, w); err == nil {
		end() // before who reads it knows that this was all
		err = w.close()
	}
	if err == nil {
		err = out.Flush()
	}
	if err != nil { // who reads it sees that it ends early
		s.Log.Warn("the contents of a part are not sent", "gpu", s.Name, "vm", p.Name, "err", err)
	}
}

func (s *Server) writeState(p *part, w io.Writer) error {
	q := s.request(p)
	err := encodeHeader(w, header{
		Version: stateVersion, Owner: p.Owner, Seal: p.seal, Memory: q.Memory, Channels: q.Channels, Mode: string(q.Mode), Config: p.server.Config(),
	})
	if err != nil {
		return err
	}
	return s.GPU.Save(p.vm, w)
}

// receiveState restores a part that awaits its contents. Repeated, it does so anew. A part
// that could not be restored goes on awaiting.
func (s *Server) receiveState(in *bufio.Reader, c net.Conn, id string) answer {
	p, err := s.begin(id, Awaiting, Sealed)
	if err != nil {
		return failed(err)
	}
	state := p.state
	defer func() { s.end(p, state) }()
	if !p.Await {
		return failed(fmt.Errorf("part %s: %w: its contents are from here", id, ErrRefused))
	}
	state = Awaiting
	// What the reader has already is of the contents, too.
	have, err := in.Peek(in.Buffered())
	if err != nil {
		return failed(err)
	}
	from := bufio.NewReaderSize(io.MultiReader(bytes.NewReader(bytes.Clone(have)), stalling{c}), maxChunk)
	if err := s.restore(p, &unchunk{from: from}); err != nil {
		return failed(fmt.Errorf("part %s: %w", id, err))
	}
	state = Sealed
	s.Log.Info("the contents of a part have come", "gpu", s.Name, "vm", p.Name)
	return answer{}
}

func (s *Server) restore(p *part, from io.Reader) (err error) {
	h, err := decodeHeader(from)
	if err != nil {
		return err
	}
	q := s.request(p)
	switch {
	case h.Owner != p.Owner:
		return fmt.Errorf("%w: it is VM %.64q's", ErrState, h.Owner)
	case h.Memory != q.Memory || h.Channels != q.Channels || h.Mode != string(q.Mode):
		return fmt.Errorf("%w: a part of %d bytes, %d channels and mode %.16q; here it has %d bytes, %d channels and mode %s",
			ErrState, h.Memory, h.Channels, h.Mode, q.Memory, q.Channels, q.Mode)
	case !pciconf.SameWindows(s.GPU.Function(), h.Config, p.Config):
		// Accesses at the new addresses may have been answered by nobody already.
		return fmt.Errorf("%w: the VM has moved its BARs since it was parked", ErrState)
	}
	if err := s.GPU.Destroy(p.vm); err != nil && !errors.Is(err, mediate.ErrNoVGPU) {
		return err
	}
	if _, err = s.GPU.Restore(q, from); err == nil {
		if err = p.server.Restore(h.Config); err == nil {
			s.mu.Lock()
			p.seal = h.Seal
			s.mu.Unlock()
			return nil
		}
		err = errors.Join(err, s.GPU.Destroy(p.vm))
	}
	// It keeps its place for the next attempt.
	if again := s.create(p); again != nil {
		err = errors.Join(err, again)
	} else if again := s.GPU.Pause(p.vm); again != nil {
		err = errors.Join(err, again)
	}
	return err
}
