package hostile

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"os"

	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

const descriptors = 250 // in one message; the kernel takes 253

// applications knock at gpuguest's socket for applications.
func applications() []client {
	with := func(f func(*net.UnixConn)) func(context.Context, Target) int {
		return func(ctx context.Context, t Target) int {
			return once(ctx, "unix", t.apps(), func(c net.Conn) { f(c.(*net.UnixConn)) })
		}
	}
	return []client{
		{"silent", 64, with(func(c *net.UnixConn) { hold(c) })},
		{"half a greeting", 64, with(func(c *net.UnixConn) {
			_, _ = c.Write(greeting()[:1+rand.IntN(63)])
			hold(c)
		})},
		{"noise", 4, with(func(c *net.UnixConn) {
			_, _ = c.Write(noise(64))
			hold(c)
		})},
		{"unknown token", 4, with(func(c *net.UnixConn) {
			_, _ = c.Write(greeting())
			hold(c)
		})},
		{"endless greeting", 2, with(func(c *net.UnixConn) { pour(c, greeting()) })},
		{"connect and close", 4, with(func(*net.UnixConn) {})},
		{"descriptors", 4, with(func(c *net.UnixConn) {
			f, err := os.Open(os.DevNull)
			if err != nil {
				return
			}
			defer f.Close()
			fds := make([]int, descriptors)
			for i := range fds {
				fds[i] = int(f.Fd())
			}
			for shm.SendFds(c, []byte{1}, fds...) == nil {
			}
		})},
	}
}

// greeting is one as it should be, with a token that nobody has.
func greeting() []byte {
	b := binary.LittleEndian.AppendUint32(nil, wire.HelloMagic)
	b = binary.LittleEndian.AppendUint32(b, wire.Version)
	b = binary.LittleEndian.AppendUint32(b, uint32(os.Getpid()))
	return append(b, noise(64-len(b))...)
}
