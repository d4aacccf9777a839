package endpoint

import (
	"fmt"
	"testing"

	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/virt/virttest"
)

// libvirtd is one with no VM, and a client that has reached it.
func libvirtd(t *testing.T, driver string) (*virttest.Server, *virt.Client) {
	t.Helper()
	s := virttest.Start(t, driver)
	v, err := virt.Open(driver+":///system", virt.WithSocket(s.Socket()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = v.Close() })
	if err := v.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s, v
}

// define defines the VM web.
func define(t *testing.T, v *virt.Client) virt.Domain {
	t.Helper()
	d, err := v.Define(t.Context(), fmt.Appendf(nil, "<domain type='%s'><name>web</name><uuid>%s</uuid></domain>", v.Driver(), lost))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// run defines the VM web and starts it.
func run(t *testing.T, v *virt.Client) virt.Domain {
	t.Helper()
	d := define(t, v)
	if _, err := v.Start(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	return d
}
