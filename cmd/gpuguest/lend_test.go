package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/vm/agent"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// A VM that lends its card has leases there, which survive gpuguest. The card is not released
// while one of them runs.
func TestVMThatLends(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	_ = free.Close()
	v := newVM(t, func(v *testVM) {
		v.write(v.config, fmt.Sprintf("version: 1\nrunDir: %s\nemulatedDevices: true\nprofiles: %s\nlend: %s\n", filepath.Join(v.dir, "run"), filepath.Join(v.dir, "profiles"), address))
	})
	v.plug(0x1234, 0x1111, 0x038000)
	d := v.await(0x1234, 0x1111)
	lends := func() {
		t.Helper()
		testkit.Until(t, "it says that it lends", func() error {
			h := v.hello()
			ok := h.Protocol == agent.Protocol && slices.Equal(h.LendAddresses, []string{address}) && len(h.Devices) == 1 && h.Devices[0].Lends
			return testkit.Want(ok, h)
		})
	}
	lends()
	lend := func(id string) (*gpuctlv1.LendResponse, error) {
		res, err := v.guest.Lend(v.ctx(), connect.NewRequest(&gpuctlv1.LendRequest{
			Lease: id, Runtime: d.Target.Runtime, PeerCertSha256: make([]byte, 32), Memory: 64 << 20, Claim: "c", Gpus: []string{"gpuvm"}, Owner: "host:x",
		}))
		if err != nil {
			return nil, err
		}
		return res.Msg, nil
	}
	first, err := lend("one")
	if err != nil || len(first.Token) != 32 || !slices.Equal(first.Addresses, []string{address}) {
		t.Fatalf("%v: %v", err, first)
	}
	release := func() error {
		_, err := v.agent.Release(v.ctx(), connect.NewRequest(&gpuctlv1.ReleaseRequest{Address: d.Address}))
		return err
	}
	inUse := func(err error) {
		t.Helper()
		if connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "lease one") {
			t.Errorf("released under a lease: %v", err)
		}
	}
	inUse(release())

	_ = v.kill(syscall.SIGKILL)
	v.start()
	lends()
	if again, err := lend("one"); err != nil || string(again.Token) != string(first.Token) {
		t.Errorf("%v: another lease", err)
	}
	inUse(release())
	if _, err := v.guest.EndLease(v.ctx(), connect.NewRequest(&gpuctlv1.EndLeaseRequest{Lease: "one"})); err != nil {
		t.Fatal(err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	if _, err := lend("two"); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("it is released: %v", err)
	}
	if left, err := os.ReadDir(filepath.Join(v.dir, "run", "leases")); err != nil || len(left) > 0 {
		t.Errorf("%v: %v", err, left)
	}
}
