package endpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"libvirt.org/go/libvirtxml"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// A plan knows what of a VM is lost, or refused by libvirt, when it is started on another host.
func TestFactsSayWhatAStartElsewhereWouldLose(t *testing.T) {
	path := filepath.Join(t.TempDir(), "web_VARS.fd")
	if err := os.WriteFile(path, []byte("variables"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, nvram := range []string{"<nvram>" + path + "</nvram>", "<nvram type='file'><source file='" + path + "'/></nvram>"} {
		var x libvirtxml.Domain
		if err := x.Unmarshal("<domain type='kvm'><name>web</name><os>" + nvram + "</os><devices><tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm></devices></domain>"); err != nil {
			t.Fatal(err)
		}
		if got := stays(&x); !slices.Equal(got, []string{"a TPM"}) {
			t.Errorf("%q", got)
		}
		disks := files(&x)
		if len(disks) != 1 || disks[0].GetPath() != path || !disks[0].GetStart() || len(disks[0].GetSum()) != 32 {
			t.Fatalf("%s: %v", nvram, disks)
		}
		there := &Local{Files: func(path string) error { _, err := os.Stat(path); return err }}
		if got := there.missing(disks); len(got) != 0 {
			t.Errorf("shared: %q", got)
		}
		stale := &gpuctlv1.SiteDisk{Path: path, Start: true, Sum: append([]byte{^disks[0].GetSum()[0]}, disks[0].GetSum()[1:]...)}
		if got := there.missing([]*gpuctlv1.SiteDisk{stale}); !slices.Equal(got, []string{path}) {
			t.Errorf("an older file of this VM: %q", got)
		}
	}
	_, v := libvirtd(t, "qemu")
	d, err := v.Define(t.Context(), fmt.Appendf(nil, "<domain type='kvm'><name>web</name><uuid>%s</uuid><!-- snapshot --><!-- snapshot --><!-- checkpoint --></domain>", lost))
	if err != nil {
		t.Fatal(err)
	}
	if snapshots, checkpoints, err := v.Snapshots(t.Context(), d); snapshots != 2 || checkpoints != 1 || err != nil {
		t.Errorf("%d snapshots, %d checkpoints, %v", snapshots, checkpoints, err)
	}
}
