package xen

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// sliced is the only device of the lab with virtual functions: an NVMe
// controller, that a catalogue file makes a model of GPU.
const sliced = "0000:06:00.0"

const slicedModel = `version: 1
models:
  - model: Lab Accelerator
    ids: ["1b36:0010"]
    anyClass: true
    memory: 4GiB
    rank: 1
`

// virtualFunctions gives a virtual function of a card to a VM that runs, for
// which it is made, and a lasting one to a VM that starts with it.
func (h *host) virtualFunctions(ctx context.Context, g *labtest.Guest) {
	h.t.Helper()
	h.refused(ctx, "it is a device of class 0108", "attach", g.Name, sliced)
	h.run(ctx, "mkdir -p /etc/gpuctl && cp /etc/gpuctl.yaml /etc/gpuctl/before.yaml && cat > /etc/gpuctl/models.yaml <<'END'\n"+slicedModel+"END\n"+
		`sed -i 's|^devices: {|devices: {catalog: [/etc/gpuctl/models.yaml], |' /etc/gpuctl.yaml && systemctl restart `+unit)
	h.answers(ctx)
	if c := h.cards(ctx)[sliced]; c.Phase != "free" {
		h.t.Fatalf("%s: %+v", sliced, c)
	}
	first := strings.TrimSuffix(sliced, "0") + "1"

	h.t.Logf("attach: %v", h.change(ctx, "attach", g.Name, sliced, "--profile", "vf"))
	h.sliceIs(ctx, g.Name, first)
	_, err := g.WaitDevice(ctx, "1b36:0010")
	must(h.t, err)
	h.t.Logf("gpuctl cards -o wide\n%s", h.must(ctx, "cards", "-o", "wide"))
	h.refused(ctx, "is cut into slices", "attach", g.Name, sliced)
	h.refused(ctx, "all functions go when their number changes", "resize", sliced, "--functions", "2")
	h.t.Logf("detach: %v", h.change(ctx, "detach", g.Name, sliced, "--unconfirmed"))
	h.gone(ctx, g, "1b36:0010")
	h.sliceIs(ctx, g.Name, "")

	h.must(ctx, "resize", sliced, "--functions", "2")
	h.sliceIs(ctx, g.Name, "")
	part := &labtest.Guest{Name: "part"}
	h.define(ctx, part, same, first)
	h.mustVirsh(ctx, "start", "part")
	h.ready(ctx, part)
	h.sliceIs(ctx, "part", first)
	_, err = part.WaitDevice(ctx, "1b36:0010")
	must(h.t, err)
	h.mustVirsh(ctx, "destroy", "part")
	h.sliceIs(ctx, "part", "")
	h.mustVirsh(ctx, "undefine", "part")
	h.must(ctx, "resize", sliced, "--functions", "0")
	if out := h.run(ctx, "cat /sys/bus/pci/devices/"+sliced+"/sriov_numvfs; basename $(readlink /sys/bus/pci/devices/"+sliced+"/driver)"); out != "0\nnvme\n" {
		h.t.Errorf("the card is not as it was: %q", out)
	}
	h.run(ctx, "cp /etc/gpuctl/before.yaml /etc/gpuctl.yaml && systemctl restart "+unit)
	h.answers(ctx)
}

// sliceIs waits until a VM has a virtual function of the card, for gpuctl, Xen
// and the kernel; empty: until nobody has one.
func (h *host) sliceIs(ctx context.Context, machine, function string) {
	h.t.Helper()
	testkit.Until(h.t, fmt.Sprintf("%s: %s has %q of %s", h.Name, machine, function, sliced), func() error {
		var all struct {
			Cards []struct {
				Address string `json:"address"`
				Slices  []struct {
					Function    string `json:"function"`
					Phase       string `json:"phase"`
					MachineName string `json:"machine_name"`
				} `json:"slices"`
			} `json:"cards"`
		}
		out := h.must(ctx, "cards", "-o", "json")
		if err := json.Unmarshal([]byte(out), &all); err != nil {
			return err
		}
		for _, c := range all.Cards {
			switch {
			case c.Address != sliced:
			case function == "" && len(c.Slices) > 0, function != "" && len(c.Slices) != 1:
				return fmt.Errorf("gpuctl says %+v", c)
			case function != "" && (c.Slices[0].Function != function || c.Slices[0].Phase != "attached" || c.Slices[0].MachineName != machine):
				return fmt.Errorf("gpuctl says %+v", c)
			}
		}
		out = h.run(ctx, "xl pci-list "+machine+" 2>/dev/null | grep -o '"+strings.TrimSuffix(sliced, "0")+".' || true")
		return testkit.Want(strings.TrimSpace(out) == function, "Xen says "+out)
	})
}
