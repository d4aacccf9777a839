package driver

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
)

// Words between a canary and who started it.
const (
	CanaryReady = "ready" // it has written its pattern
	CanaryCheck = "check" // tell whether the pattern is there
	CanaryGood  = "good"
	CanaryBad   = "bad"
)

// canaryBytes is how much a canary has on the GPU.
const canaryBytes = 16 << 20

// Canary is a process with a context and a pattern in a GPU's memory, and nothing to lose:
// it is suspended, moved and resumed before applications are. It prints CanaryReady, and for
// each line of its input whether the pattern is there. It ends with its input.
func Canary(gpu ask.UUID, in io.Reader, out io.Writer) error {
	runtime.LockOSThread() // a context is current for one thread
	defer runtime.UnlockOSThread()
	c, err := openCUDA()
	if err != nil {
		return err
	}
	if err := c.init(); err != nil {
		return err
	}
	if err := c.use(gpu); err != nil {
		return err
	}
	host, ptr := alloc(canaryBytes), alloc(8)
	defer host.free()
	defer ptr.free()
	if err := c.ok("cuMemAlloc_v2", ptr.at(), canaryBytes); err != nil {
		return err
	}
	where := uintptr(binary.NativeEndian.Uint64(ptr.bytes()))
	seed := rand.Uint64() //nolint:gosec // of a pattern, no secret
	fill := func(each func(i int, v uint64)) {
		r := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // a pattern, no secret
		for i := 0; i < canaryBytes; i += 8 {
			each(i, r.Uint64())
		}
	}
	fill(func(i int, v uint64) { binary.NativeEndian.PutUint64(host.bytes()[i:], v) })
	if err := c.ok("cuMemcpyHtoD_v2", where, host.at(), canaryBytes); err != nil {
		return err
	}
	fmt.Fprintln(out, CanaryReady)
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		clear(host.bytes())
		if err := c.ok("cuMemcpyDtoH_v2", host.at(), where, canaryBytes); err != nil {
			return err
		}
		word := CanaryGood
		fill(func(i int, v uint64) {
			if binary.NativeEndian.Uint64(host.bytes()[i:]) != v {
				word = CanaryBad
			}
		})
		fmt.Fprintln(out, word)
	}
	return lines.Err()
}

// use makes the primary context of a GPU current.
func (c *cuda) use(gpu ask.UUID) error {
	out := alloc(16)
	defer out.free()
	number := func() uintptr { return uintptr(binary.NativeEndian.Uint32(out.bytes())) }
	if err := c.ok("cuDeviceGetCount", out.at()); err != nil {
		return err
	}
	for i := range number() {
		if err := c.ok("cuDeviceGet", out.at(), i); err != nil {
			return err
		}
		device := number()
		if err := c.ok("cuDeviceGetUuid", out.at(), device); err != nil {
			return err
		}
		if ask.NewUUID([16]byte(out.bytes())) != gpu {
			continue
		}
		if err := c.ok("cuDevicePrimaryCtxRetain", out.at(), device); err != nil {
			return err
		}
		return c.ok("cuCtxSetCurrent", uintptr(binary.NativeEndian.Uint64(out.bytes())))
	}
	return fmt.Errorf("the driver shows no %s", gpu)
}

func (c *cuda) ok(name string, args ...uintptr) error {
	code, err := c.call(name, args...)
	if err != nil {
		return err
	}
	if code != 0 {
		return fmt.Errorf("%s: %s (%d)", name, c.nameOf(code), code)
	}
	return nil
}
