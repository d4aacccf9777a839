package platform

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/domxml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// mediated attaches mediated devices to VMs of libvirt's qemu driver.
type mediated struct{ client *virt.Client }

func (m mediated) Owners(ctx context.Context) (map[string]vm.VM, error) {
	out := map[string]vm.VM{}
	err := eachRunning(ctx, m.client, func(owner vm.VM, doc *domxml.Document) {
		for _, h := range doc.HostDevices() {
			if h.Source.MDev != "" {
				out[strings.ToLower(h.Source.MDev)] = owner
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (m mediated) Attach(ctx context.Context, machine, device string) error {
	d, err := vms(m).find(ctx, machine)
	if err != nil {
		return err
	}
	return m.client.Attach(ctx, d, domxml.HostDevice{Source: domxml.Source{MDev: device}}.XML(), virt.Live)
}

func (m mediated) Detach(ctx context.Context, machine, device string) error {
	d, err := vms(m).find(ctx, machine)
	if err != nil {
		return err
	}
	doc, err := document(ctx, m.client, d, 0)
	if err != nil {
		return err
	}
	source := domxml.Source{MDev: device}
	text, err := doc.DeviceXML(source)
	if errors.Is(err, domxml.ErrNotFound) {
		text, err = domxml.HostDevice{Source: source}.XML(), nil // libvirt may have changed the VM nevertheless
	}
	if err != nil {
		return err
	}
	return m.client.Detach(ctx, d, text, virt.Live)
}

// sriovManage is the program of NVIDIA's vGPU software that switches all virtual
// functions of a card on or off. NVIDIA's driver does not accept a number in
// sriov_numvfs.
const sriovManage = "usr/lib/nvidia/sriov-manage"

func exists(root fs.FS, name string) bool {
	_, err := fs.Stat(root, name)
	return err == nil
}

// read returns an attribute of a function in sysfs; empty: it does not exist.
func read(root fs.FS, a pci.Address, name string) string {
	data, err := fs.ReadFile(root, "sys/bus/pci/devices/"+a.String()+"/"+name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// switchNVIDIA returns a function that sets the number of virtual functions of NVIDIA's
// cards. It reports false if NVIDIA's program is not installed, or the card is another
// vendor's.
func switchNVIDIA(root fs.FS) func(context.Context, pci.Address, int) (bool, error) {
	return func(ctx context.Context, pf pci.Address, n int) (bool, error) {
		if read(root, pf, "vendor") != "0x10de" || !exists(root, sriovManage) {
			return false, nil
		}
		if most := read(root, pf, "sriov_totalvfs"); n > 0 && most != "" && most != strconv.Itoa(n) {
			return false, fmt.Errorf("NVIDIA's sriov-manage makes all %s virtual functions or none, not %d", most, n)
		}
		flag := "-e"
		if n == 0 {
			flag = "-d"
		}
		out, err := exec.CommandContext(ctx, "/"+sriovManage, flag, pf.String()).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("sriov-manage %s %s: %w: %.300s", flag, pf, err, out)
		}
		return err == nil, err
	}
}
