package isolation

import (
	"errors"
	"os"
	"testing"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/xen"
)

// TestThisMachine examines the cards of the machine it runs on, by hypercall in
// a control domain that it knows, and shows the reports.
func TestThisMachine(t *testing.T) {
	root := os.DirFS("/")
	cards, err := pci.Scan(root)
	if err != nil {
		t.Fatal(err)
	}
	var source Source = Kernel{Root: root}
	if xen.Detect(root) == nil {
		v, err := xen.ReadVersion(root)
		if err != nil {
			t.Fatal(err)
		}
		p, err := xen.OpenPrivcmd("/dev/xen", v)
		switch {
		case errors.Is(err, xen.ErrVersion):
			source = Xen{Root: root, Hypervisor: &xen.XL{}}
		case err != nil:
			t.Fatal(err)
		default:
			defer p.Close()
			source = Xen{Root: root, Hypervisor: p}
		}
	}
	for _, c := range cards {
		r, err := Examine(t.Context(), c, source)
		if err != nil {
			t.Error(err)
		}
		for _, reason := range r.Reasons {
			if reason.Text == "" || reason.Do == "" || reason.Verdict > r.Verdict {
				t.Errorf("%s: %+v", c.Address, reason)
			}
		}
		t.Logf("\n%s", r)
	}
}
