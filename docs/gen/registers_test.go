package main

import (
	"os"
	"testing"

	"github.com/gpuctl/gpuctl/mmio/regs"
)

func TestListOfRegistersIsThatOfTheTable(t *testing.T) {
	have, err := os.ReadFile("../mmio-registers.md")
	if err != nil || string(have) != regs.Markdown() {
		t.Errorf("docs/mmio-registers.md is not as the table of mmio/regs: make generate (%v)", err)
	}
}
