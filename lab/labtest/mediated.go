package labtest

import (
	"context"
	"fmt"

	"github.com/gpuctl/gpuctl/lab"
)

// MediatedInitrd is the initrd of guests that use mediated GPUs, on hosts with
// [InstallMediated]: they have /mmiolab.
const MediatedInitrd = "/run/gpuctl-lab/mmio.img"

// InstallMediated puts on a host what its guests use mediated GPUs with, and the same program for
// dom0.
func InstallMediated(ctx context.Context, h *lab.Host) error {
	if err := Install(ctx, h, "mmiolab"); err != nil {
		return err
	}
	_, err := h.Run(ctx, "set -e; mkdir -p /run/gpuctl-lab; cd /usr/local/bin; (cat "+kit+"initrd.img; echo mmiolab | cpio --quiet -o -H newc | gzip) >"+MediatedInitrd)
	if err != nil {
		return fmt.Errorf("initrd of guests with mediated GPUs on host %s: %w", h.Name, err)
	}
	return nil
}
