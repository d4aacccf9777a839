package capture

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"time"
)

const (
	commandTime = 15 * time.Second
	factsTime   = 2 * time.Minute
	maxDomains  = 256
	maxDevices  = 256
)

// ask runs the commands of Xen, libvirt and the kernel. A program that does not answer in
// time is not run again.
func ask(ctx context.Context, run Runner, xen bool, gpus []string) ([]Fact, map[string][]byte) {
	ctx, cancel := context.WithTimeout(ctx, factsTime)
	defer cancel()
	a := &asker{run: run, data: map[string][]byte{}, silent: map[string]bool{}}
	a.ask(ctx, "dmesg.txt", relevant, "dmesg")
	uri := "qemu:///system"
	if xen {
		uri = "xen:///system"
		a.ask(ctx, "xl-info.txt", nil, "xl", "info", "-n")
		a.ask(ctx, "xl-list.txt", nil, "xl", "list")
		a.ask(ctx, "xl-pci-assignable-list.txt", nil, "xl", "pci-assignable-list")
		a.ask(ctx, "xl-dmesg.txt", nil, "xl", "dmesg")
	}
	virsh := func(name string, edit func([]byte) ([]byte, error), words ...string) []byte {
		return a.ask(ctx, name, edit, append([]string{"virsh", "--readonly", "--connect", uri}, words...)...)
	}
	virsh("virsh-version.txt", nil, "version")
	virsh("virsh-capabilities.xml", cutXML, "capabilities")
	for _, address := range gpus[:min(len(gpus), maxDevices)] {
		name := "pci_" + strings.NewReplacer(":", "_", ".", "_").Replace(address)
		virsh("nodedev/"+name+".xml", cutXML, "nodedev-dumpxml", name)
	}
	domains := strings.Fields(string(virsh("virsh-list.txt", nil, "list", "--all", "--uuid")))
	for _, uuid := range domains[:min(len(domains), maxDomains)] {
		if len(uuid) == 36 && uuidPattern().MatchString(uuid) {
			virsh("domain/"+uuid+".xml", cutXML, "dumpxml", uuid)
		}
	}
	return a.facts, a.data
}

type asker struct {
	run    Runner
	facts  []Fact
	data   map[string][]byte
	silent map[string]bool // programs that are not installed, or did not answer
}

// ask runs a command. edit returns the part of its output that may be kept.
func (a *asker) ask(ctx context.Context, name string, edit func([]byte) ([]byte, error), argv ...string) []byte {
	f := Fact{Name: name, Command: argv}
	defer func() { a.facts = append(a.facts, f) }()
	if a.silent[argv[0]] {
		f.Error = "not asked: " + argv[0] + " did not answer before"
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	out, err := a.run(ctx, argv...)
	if err != nil {
		f.Error = err.Error()
		a.silent[argv[0]] = errors.Is(err, exec.ErrNotFound) || ctx.Err() != nil
		return nil
	}
	if edit != nil {
		if out, err = edit(out); err != nil {
			f.Error = "left out: " + err.Error()
			return nil
		}
	}
	a.data[name] = out[:min(len(out), maxFact)]
	return a.data[name]
}

// relevant returns the lines of the kernel's log that are about passthrough.
func relevant(log []byte) ([]byte, error) {
	about := regexp.MustCompile(`(?i)xen|pciback|vfio|iommu|DMAR|AMD-Vi|\bpci\b|pcieport|\bAER\b|nvidia|NVRM|nouveau|amdgpu|i915|\bdrm\b|mdev|mlx5|sr-?iov`)
	var out bytes.Buffer
	for line := range bytes.Lines(log) {
		if about.Match(line) {
			out.Write(line)
		}
	}
	return out.Bytes(), nil
}

// Commands runs programs of the host, without a terminal and in the C locale. A program
// that does not end in time is killed, with its child processes.
func Commands(ctx context.Context, argv ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	out := &limited{most: maxFact}
	said := &limited{most: 2 << 10}
	cmd.Stdout, cmd.Stderr = out, said
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "HOME=/nonexistent"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		text, _, _ := strings.Cut(strings.TrimSpace(string(said.data)), "\n")
		if text != "" {
			return nil, fmt.Errorf("%s: %w: %s", argv[0], err, text)
		}
		return nil, fmt.Errorf("%s: %w", argv[0], err)
	}
	return out.data, nil
}

// limited keeps only the first bytes.
type limited struct {
	data []byte
	most int
}

func (l *limited) Write(p []byte) (int, error) {
	l.data = append(l.data, p[:min(len(p), l.most-len(l.data))]...)
	return len(p), nil
}
