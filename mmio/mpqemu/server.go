package mpqemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/pciconf"
)

// Server serves a device to one QEMU. QEMU has the other end of the socket from its start
// on, and asks at once: Serve must run before QEMU is ready.
type Server struct {
	conn    *net.UnixConn
	vm      mmio.VM
	space   *pciconf.Space
	guest   guest
	refused atomic.Uint64
}

// New returns a server of a function for a VM. It closes the connection at the end of
// Serve.
func New(conn *net.UnixConn, vm mmio.VM, f mmio.Function) (*Server, error) {
	for i := range f.BARs {
		f.BARs[i].Wide = false
	}
	f.MSI = false // QEMU would keep the interrupt's address for itself
	space, err := pciconf.New(f)
	if err != nil {
		return nil, err
	}
	return &Server{conn: conn, vm: vm, space: space}, nil
}

// Guest is the VM's memory and interrupt.
func (s *Server) Guest() mmio.Guest { return &s.guest }

// Refused returns how many accesses were for no register and no BAR.
func (s *Server) Refused() uint64 { return s.refused.Load() }

// Serve answers QEMU until that ends, and then returns nil. If QEMU sends what it must
// not, the error wraps ErrProtocol. If ctx ends, so does the VM's QEMU: it cannot go on
// without its device.
func (s *Server) Serve(ctx context.Context, d mmio.Device) error {
	defer s.guest.close()
	defer s.conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = s.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	for {
		m, files, err := s.receive()
		if err == nil {
			err = s.handle(m, files, d)
		}
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
			return nil
		default:
			return fmt.Errorf("serve a device to QEMU: %w", err)
		}
	}
}

// receive returns the next message. The caller owns the files.
func (s *Server) receive() (m message, files []int, err error) {
	defer func() {
		if err != nil {
			closeAll(files)
			files = nil
		}
	}()
	header := make([]byte, headerSize)
	oob := make([]byte, unix.CmsgSpace(4*2*maxFiles))
	n, oobn, flags, _, err := s.conn.ReadMsgUnix(header, oob)
	if err != nil {
		return m, nil, err
	}
	if oobn > 0 {
		if files, err = descriptors(oob[:oobn]); err != nil {
			return m, files, err
		}
	}
	if flags&unix.MSG_CTRUNC != 0 {
		return m, files, fmt.Errorf("%w: too many files", ErrProtocol)
	}
	if n == 0 {
		return m, files, io.EOF
	}
	if _, err := io.ReadFull(s.conn, header[n:]); err != nil {
		return m, files, err
	}
	cmd, size, err := payload(header)
	if err != nil {
		return m, files, err
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(s.conn, body); err != nil {
		return m, files, err
	}
	m, err = parse(cmd, body, len(files))
	return m, files, err
}

func descriptors(oob []byte) (files []int, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue // credentials or the like
		}
		files = append(files, fds...)
	}
	return files, nil
}

func (s *Server) handle(m message, files []int, d mmio.Device) error {
	switch m.cmd {
	case cmdMemory:
		return s.guest.memory(m.areas, files)
	case cmdInterrupts:
		return s.guest.interrupts(files)
	}
	_, err := s.conn.Write(answer(s.access(m, d)))
	return err
}

// access returns the answer to an access or a reset.
func (s *Server) access(m message, d mmio.Device) uint64 {
	switch m.cmd {
	case cmdReset:
		s.space.Reset()
		if r, ok := d.(mmio.Resetter); ok {
			r.Reset(s.vm)
		}
		return 0
	case cmdConfigRead:
		v, ok := s.space.Read(m.addr, m.size)
		s.count(ok)
		return uint64(v)
	case cmdConfigWrite:
		_, ok := s.space.Write(m.addr, m.size, uint32(m.value))
		s.count(ok)
		return 0
	}
	bar, offset, ok := s.space.Find(m.addr, m.size)
	if ok = ok && !m.io; !ok {
		s.count(false)
		return mmio.Ones(uint8(m.size))
	}
	a := mmio.Access{VM: s.vm, BAR: uint8(bar), Size: uint8(m.size), Offset: offset}
	if m.cmd == cmdBARRead {
		return d.Read(a) & mmio.Ones(a.Size)
	}
	a.Write, a.Data = true, m.value&mmio.Ones(a.Size)
	d.Write(a)
	return 0
}

func (s *Server) count(ok bool) {
	if !ok {
		s.refused.Add(1)
	}
}
