package main

import (
	"log/slog"
	"os"
	"path/filepath"

	"github.com/gpuctl/gpuctl/guest/cuda"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/internal/glimpse"
)

// driverNodes names the folder of the driver's nodes if it is not /dev, as for a fake driver.
const driverNodes = "GPUCTL_DRIVER_NODES"

// newDriverEngine returns the engine of sessions of CUDA processes. Without NVIDIA's driver
// it has no sessions. dir is gpuguest's run folder; detach says that cards are taken away
// from suspended sessions, as in a VM; for whose, see session.Config.
func newDriverEngine(dir string, detach bool, whose func(uint32) uint32, log *slog.Logger) (*cuda.Manager, error) {
	return cuda.New(cuda.Config{
		Dir: filepath.Join(dir, "cuda"), Logger: log, Faults: os.Getenv("GPUCTL_FAULTS") == "1", Detach: detach,
		Roots: holders.Roots{Dev: os.Getenv(driverNodes), Reads: &glimpse.Reads{Whose: whose}}, UID: uint32(os.Geteuid()),
	})
}
