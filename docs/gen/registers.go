package main

import (
	"os"
	"path/filepath"

	"github.com/gpuctl/gpuctl/mmio/regs"
)

// writeRegisters writes dir/mmio-registers.md.
func writeRegisters(dir string) error {
	return os.WriteFile(filepath.Join(dir, "mmio-registers.md"), []byte(regs.Markdown()), 0o644)
}
