package config_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/hostd/config"
)

func TestMediatedGPUs(t *testing.T) {
	c, err := config.Parse([]byte("version: 1\nmmio:\n  gpus:\n  - {name: soft0, memory: 1GiB, vms: 4}\n"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := c.MMIO.GPUs[0].Model()
	if err != nil || m.Each() != 256<<20 || m.Parts != 4 || m.Policy != "fair" {
		t.Errorf("%+v, %v", m, err)
	}
	for name, text := range map[string]string{
		"no name":        "{memory: 1GiB, vms: 4}",
		"no memory":      "{name: a, vms: 4}",
		"no VMs":         "{name: a, memory: 1GiB}",
		"too many VMs":   "{name: a, memory: 1GiB, vms: 65}",
		"too little":     "{name: a, memory: 2MiB, vms: 4}",
		"odd memory":     "{name: a, memory: 1000, vms: 1}",
		"unknown policy": "{name: a, memory: 1GiB, vms: 4, policy: best}",
		"twice":          "{name: a, memory: 1GiB, vms: 4}\n  - {name: a, memory: 1GiB, vms: 4}",
	} {
		if _, err := config.Parse([]byte("version: 1\nmmio:\n  gpus:\n  - " + text + "\n")); !errors.Is(err, config.ErrInvalid) || !strings.Contains(err.Error(), "mmio.gpus") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
