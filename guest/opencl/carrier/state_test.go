package carrier

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
)

// farState is the end of a far host that sends a state: what it says of the size, and then
// what comes.
type farState struct {
	io.Reader
	asked bytes.Buffer
}

func (f *farState) Write(b []byte) (int, error) { return f.asked.Write(b) }

func sends(n uint64, content io.Reader) *farState {
	return &farState{Reader: io.MultiReader(bytes.NewReader(binary.LittleEndian.AppendUint64(nil, n)), content)}
}

// endless is content that does not end. It fails the test if it is read.
type endless struct{ t *testing.T }

func (e endless) Read(b []byte) (int, error) {
	e.t.Error("content of a state that is refused is read")
	return 0, io.ErrUnexpectedEOF
}

const leased = 2 << 30

// savingIn returns a carrier that is about to write a state into a file, or into memory.
func savingIn(t *testing.T, memory bool) *carrier {
	t.Helper()
	c := newCarrier(t)
	c.cfg.Remote = &gpuctlv1.Remote{Memory: leased}
	if memory {
		fd, err := unix.MemfdCreate("state", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		c.state = os.NewFile(uintptr(fd), "state")
		c.saving = saving{f: c.state, memory: true}
	} else {
		f, err := os.Create(filepath.Join(t.TempDir(), "state"))
		if err != nil {
			t.Fatal(err)
		}
		c.saving = saving{f: f, name: f.Name()}
	}
	t.Cleanup(func() { c.saving.f.Close() })
	return c
}

func (c *carrier) blocks(t *testing.T) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(c.saving.f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks
}

// A state that is larger than the session can have, or than this host has room for, is
// refused with the numbers before any of it is written.
func TestStateOfAHostileFarHostIsBounded(t *testing.T) {
	for name, x := range map[string]struct {
		usage *gpuctlv1.Usage
		n     uint64
		lease uint64
		says  []string
	}{
		"the most that fits into the number": {&gpuctlv1.Usage{Memory: 1 << 20, Buffers: 2}, remote.GetState - 1, leased, []string{"of a session with 1 MiB in 2 buffers and 0 images, which may have 2 GiB"}},
		"more than the session can have":     {&gpuctlv1.Usage{Memory: 1 << 20, Buffers: 2}, 8 << 30, leased, []string{"a state of 8 GiB comes", "may have 2 GiB", "at most"}},
		"more than there is room for":        {&gpuctlv1.Usage{Memory: 1 << 41}, 1 << 41, 0, []string{"a state of 2 TiB comes", "left for it"}},
	} {
		for _, memory := range []bool{false, true} {
			c := savingIn(t, memory)
			c.cfg.Remote.Memory = x.lease
			err := c.receiveState(sends(x.n, endless{t}), x.usage, func(uint64, uint64) {})
			if connect.CodeOf(err) != connect.CodeResourceExhausted {
				t.Fatalf("%s, memory %v: %v", name, memory, err)
			}
			for _, want := range x.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%s: %v", name, err)
				}
			}
			if n := c.blocks(t); n != 0 {
				t.Errorf("%s: %d blocks were taken", name, n)
			}
		}
	}
}

// What a session can have comes, page by page and with its index, also where objects were
// released while it was written.
func TestStateOfAnHonestFarHostComes(t *testing.T) {
	for _, memory := range []bool{false, true} {
		const objects = 1000
		c := savingIn(t, memory)
		content := bytes.Repeat([]byte("state "), (2*objects*4096+objects*32+24)/6)
		far := sends(uint64(len(content)), bytes.NewReader(content))
		if err := c.receiveState(far, &gpuctlv1.Usage{Memory: objects, Buffers: objects - 1, Images: 1}, func(uint64, uint64) {}); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(far.asked.Bytes(), binary.LittleEndian.AppendUint64(nil, remote.GetState)) {
			t.Errorf("it has asked for %x", far.asked.Bytes())
		}
		got := make([]byte, len(content))
		if _, err := c.saving.f.ReadAt(got, 0); err != nil || !bytes.Equal(got, content) {
			t.Errorf("another state came: %v", err)
		}
	}
}

// bragger says that its session has so much memory.
type bragger struct {
	farStub
	memory uint64
}

func (b bragger) Describe(context.Context, *connect.Request[gpuctlv1.DescribeRequest]) (*connect.Response[gpuctlv1.DescribeResponse], error) {
	return connect.NewResponse(&gpuctlv1.DescribeResponse{Usage: &gpuctlv1.Usage{Memory: b.memory}}), nil
}

// Room is reserved for no more than the lease permits, and than there is.
func TestNoRoomIsReservedForWhatAFarHostMakesUp(t *testing.T) {
	for lease, says := range map[uint64]string{leased: "and the session may have 2 GiB there", 0: "left for it"} {
		c := savingIn(t, true)
		f := c.saving.f
		c.cfg.Remote.Memory, c.far, c.saving = lease, bragger{memory: 1 << 41}, saving{}
		err := c.beginState(t.Context(), &gpuctlv1.ExportRequest{Memory: true})
		if connect.CodeOf(err) != connect.CodeResourceExhausted || !strings.Contains(err.Error(), says) {
			t.Errorf("%v", err)
		}
		if c.saving.f != nil {
			t.Error("the state is still being written")
		}
		c.saving.f = f
		if n := c.blocks(t); n != 0 {
			t.Errorf("%d blocks were taken", n)
		}
	}
}
