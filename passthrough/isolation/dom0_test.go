package isolation

import (
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
		hv, why := xen.Open(root, "/dev/xen")
		if why != nil {
			t.Log(why)
		}
		defer hv.Close()
		source = Xen{Root: root, Hypervisor: hv}
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
