package lab

import "fmt"

// A Card is an emulated PCI card of a host.
type Card struct {
	Slot   string   // where dom0 finds function 0, such as "0000:01:00.0"
	Model  string   // what QEMU emulates
	IDs    []string // vendor:device of each function, such as "1234:11e8"
	What   string   // what a test can use it for
	Behind bool     // behind a root port of its own, so that it can be reset
	// Late cards are plugged in after a snapshot was loaded: QEMU cannot save them.
	Late bool
}

// Cards returns the cards of every host. A test tells a card is alive inside a
// guest by registers that read as constants: an edu answers 0x010000ed at
// offset 0 of BAR 0, a bochs-display 0xb0c5 (16 bits) at offset 0x500 of BAR 2.
func Cards() []Card {
	return []Card{
		{Slot: "0000:01:00.0", Model: "edu", IDs: []string{"1234:11e8"}, Behind: true, What: "a GPU, first model"},
		{Slot: "0000:02:00.0", Model: "edu", IDs: []string{"1234:11e8"}, Behind: true, What: "a GPU, first model"},
		{Slot: "0000:03:00.0", Model: "bochs-display", IDs: []string{"1234:1111"}, Behind: true, What: "a GPU, second model"},
		{Slot: "0000:04:00.0", Model: "bochs-display and intel-hda", IDs: []string{"1234:1111", "8086:2668"}, Behind: true, What: "a GPU, second model, with a sound function"},
		{Slot: "0000:05:00.0", Model: "virtio-gpu", IDs: []string{"1af4:1050"}, Behind: true, What: "a GPU, third model, with FLR and PM reset"},
		{Slot: "0000:06:00.0", Model: "nvme", IDs: []string{"1b36:0010"}, Behind: true, Late: true, What: "SR-IOV, up to 4 VFs; FLR"},
		{Slot: "0000:00:10.0", Model: "secondary-vga", IDs: []string{"1234:1111"}, What: "a GPU on the root bus: nothing resets it"},
	}
}

// cardArgs are QEMU's arguments for the cards that are there from the start.
func cardArgs() []string {
	var args []string
	port := func(n int, devices ...string) {
		args = append(args, "-device", fmt.Sprintf("pcie-root-port,id=rp%d,chassis=%d,slot=%d,addr=%#x", n, n, n, 7+n))
		for _, d := range devices {
			args = append(args, "-device", fmt.Sprintf("%s,bus=rp%d", d, n))
		}
	}
	port(1, "edu")
	port(2, "edu")
	port(3, "bochs-display")
	port(4, "bochs-display,addr=0.0,multifunction=on", "intel-hda,addr=0.1")
	port(5, "virtio-gpu-pci")
	port(6)
	return append(args, "-device", "nvme-subsys,id=sub0", "-device", "secondary-vga,addr=0x10")
}

// lateCard is what device_add takes for the card that QEMU cannot save.
func lateCard() map[string]any {
	return map[string]any{
		"driver": "nvme", "id": "nvme0", "bus": "rp6", "serial": "lab", "subsys": "sub0",
		"sriov_max_vfs": 4, "sriov_vq_flexible": 8, "sriov_vi_flexible": 4, "max_ioqpairs": 16, "msix_qsize": 17,
	}
}
