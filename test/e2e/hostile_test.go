package e2e

import (
	"encoding/binary"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/test/rig"
)

// liar plays gpuguest and an executor that says what the test wants.
type liar struct {
	t       *testing.T
	answers map[wire.Op]func(wire.Request) ([]byte, uint64) // data, and its whole length as claimed; 0: as it is
}

const liarArena = 64 << 20

func u32s(v ...uint32) []byte {
	var b []byte
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, x)
	}
	return b
}

func u64s(v ...uint64) []byte {
	var b []byte
	for _, x := range v {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	return b
}

// serve gives one application a session, and ends with it.
func (l *liar) serve(listener *net.UnixListener) {
	conn, err := listener.AcceptUnix()
	if err != nil {
		return
	}
	defer conn.Close()
	_, fds, err := shm.RecvFds(conn, make([]byte, 64), 4)
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	if err != nil {
		l.t.Error(err)
		return
	}
	var mem [3]*shm.Region
	for i, size := range []int64{wire.RingMem, liarArena, 0} {
		if mem[i], err = shm.Create("liar", size); err != nil {
			l.t.Error(err)
			return
		}
		defer mem[i].Close()
	}
	ring, err := shm.NewRing(mem[0])
	if err != nil {
		l.t.Error(err)
		return
	}
	ring.Init(liarArena, liarArena/2)
	ring.SetOwner(1)
	ring.SetState(wire.StateRunning)
	fd, err := shm.Reopen(mem[0].FD())
	if err != nil {
		l.t.Error(err)
		return
	}
	defer unix.Close(fd)
	if err := shm.LockByte(fd, wire.LockExecutor); err != nil {
		l.t.Error(err)
		return
	}
	if err := shm.SendFds(conn, u32s(0, 0), mem[0].FD(), mem[1].FD(), mem[2].FD()); err != nil {
		l.t.Error(err)
		return
	}
	over := make(chan struct{}) // the application has ended
	go func() {
		_, _ = conn.Read(make([]byte, 1))
		close(over)
		ring.WakeReader()
	}()
	buf := make([]byte, wire.MaxRequest)
	for {
		rec, ok, err := ring.Next(buf)
		if err != nil {
			l.t.Error(err)
			return
		}
		if !ok {
			select {
			case <-over:
				return
			default:
			}
			ring.Sleep(time.Second)
			continue
		}
		l.answer(ring, rec)
		ring.Advance()
	}
}

func (l *liar) answer(ring *shm.Ring, rec shm.Record) {
	if rec.Slot == wire.NoSlot {
		return
	}
	var data []byte
	var total uint64
	if f := l.answers[rec.Op]; f != nil {
		m := wire.New(rec.Op)
		if err := m.Decode(rec.Body); err != nil {
			l.t.Error(err)
			return
		}
		data, total = f(m)
	}
	if total == 0 {
		total = uint64(len(data))
	}
	token := uint32(0)
	if total > uint64(len(data)) {
		token = 1
	}
	if err := ring.Reply(rec.Slot, 0, data, token, total); err != nil {
		l.t.Error(err)
	}
}

func device() []byte {
	b := u32s(0, 0, 1, 0, 1, 2)
	b = append(b, u32s(cl.DeviceType, 8)...)
	b = append(b, u64s(cl.DeviceTypeGpu)...)
	b = append(b, u32s(cl.DeviceImageSupport, 4, 1, 0)...)
	return b
}

// TestHostileExecutorCannotReachTheApplicationsMemory has an executor lie about
// lengths, pitches and offsets. The application believes its library, so the
// library must not pass them on.
func TestHostileExecutorCannotReachTheApplicationsMemory(t *testing.T) {
	root, err := rig.Root()
	if err != nil {
		t.Fatal(err)
	}
	image := u64s(16*64, 64, 1024, 4)
	const (
		fine      = "0"
		mapFailed = "-12"
		resources = "-5"
	)
	cases := []struct {
		name, arg, want string
		image, mapping  []byte
		sizes           []uint64 // of the binary, by the time it is asked for
		binary          int
		total           uint64
	}{
		{name: "honest", arg: "map2d", want: fine, mapping: u64s(4096, 64, 1024, 0)},
		{name: "rows beyond the arena", arg: "map2d", want: mapFailed, mapping: u64s(liarArena-1024+64, 64, 1024, 0)},
		{name: "offset beyond the arena", arg: "map2d", want: mapFailed, mapping: u64s(1<<63, 64, 1024, 0)},
		{name: "large row pitch", arg: "map2d", want: mapFailed, mapping: u64s(4096, 1<<40, 1<<44, 0)},
		{name: "row pitch that overflows", arg: "map2d", want: mapFailed, mapping: u64s(4096, 1<<60, 1<<60, 0)},
		{name: "negative row pitch", arg: "map2d", want: mapFailed, mapping: u64s(4096, ^uint64(4095), 0, 0)},
		{name: "rows that overlap", arg: "map2d", want: mapFailed, mapping: u64s(4096, 8, 1024, 0)},
		{name: "a short reply", arg: "map2d", want: mapFailed, mapping: u64s(4096)},
		{name: "honest, 3D", arg: "map3d", want: fine, mapping: u64s(4096, 64, 1024, 0)},
		{name: "large slice pitch", arg: "map3d", want: mapFailed, mapping: u64s(4096, 64, 1<<40, 0)},
		{name: "slice pitch that overflows", arg: "map3d", want: mapFailed, mapping: u64s(4096, 64, 1<<62, 0)},
		{name: "slices that overlap", arg: "map3d", want: mapFailed, mapping: u64s(4096, 64, 64, 0)},
		{name: "honest, array", arg: "map1darray", want: fine, mapping: u64s(4096, 64, 64, 0)},
		{name: "array's slice pitch", arg: "map1darray", want: mapFailed, mapping: u64s(4096, 64, 1<<40, 0)},
		{name: "array without slice pitch and rows that overlap", arg: "map1darray", want: mapFailed, mapping: u64s(4096, 8, 8, 0)},
		{name: "honest image", arg: "image", want: fine, image: image},
		{name: "larger pixels", arg: "image", want: resources, image: u64s(16*64, 64, 1024, 64)},
		{name: "small row pitch of an image", arg: "image", want: resources, image: u64s(16*64, 1, 1024, 4)},
		{name: "honest binary", arg: "binaries", want: fine, sizes: []uint64{8, 8}, binary: 8},
		{name: "binary that grows", arg: "binaries", want: resources, sizes: []uint64{8, 400}, binary: 400},
		{name: "binary larger than what came", arg: "binaries", want: resources, sizes: []uint64{8, 8}, binary: 4},
		{name: "endless reply", arg: "names", want: resources, total: 1 << 50},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if c.image == nil {
				c.image = image
			}
			asked := 0
			l := &liar{t: t, answers: map[wire.Op]func(wire.Request) ([]byte, uint64){
				wire.OpSessionInfo: func(wire.Request) ([]byte, uint64) { return device(), 0 },
				wire.OpCreateImage: func(wire.Request) ([]byte, uint64) { return c.image, 0 },
				wire.OpMapImage:    func(wire.Request) ([]byte, uint64) { return c.mapping, 0 },
				wire.OpProgramInfo: func(m wire.Request) ([]byte, uint64) {
					switch m.(*wire.ProgramInfo).Param {
					case cl.ProgramBinarySizes:
						asked++
						return u64s(c.sizes[min(asked, len(c.sizes))-1]), 0
					case cl.ProgramBinaries:
						return make([]byte, c.binary), 0
					}
					return []byte("f\x00"), c.total
				},
			}}
			dir := t.TempDir()
			socket := filepath.Join(dir, "s")
			listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			served := make(chan struct{})
			go func() { defer close(served); l.serve(listener) }()
			env, err := rig.Vendor(filepath.Join(dir, "v"), filepath.Join(root, "lib/libgpuctl-opencl.so"), nil)
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), filepath.Join(root, "test/cl/bin/gullible"), c.arg)
			cmd.Env = append(append(os.Environ(), env...), "GPUCTL_SOCKET="+socket, "MALLOC_PERTURB_=85")
			out, err := cmd.CombinedOutput()
			listener.Close()
			<-served
			if got := strings.TrimSpace(string(out)); err != nil || got != c.want {
				t.Errorf("%q (%v), want %s", got, err, c.want)
			}
		})
	}
}
