package xen

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

const (
	xlTimeout = 10 * time.Second
	xlGrace   = time.Second // between the end of xl and that of its child processes
)

// XL asks the hypervisor through Xen's program xl, which has the hypervisor's version. It
// does not provide device groups.
type XL struct {
	// Path is the path of the program; empty: "xl", in PATH.
	Path string
	// Timeout limits one run; zero: ten seconds.
	Timeout time.Duration
}

var _ Hypervisor = (*XL)(nil)

func (x *XL) run(ctx context.Context, args ...string) (string, error) {
	timeout, path := x.Timeout, x.Path
	if timeout == 0 {
		timeout = xlTimeout
	}
	if path == "" {
		path = "xl"
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = xlGrace
	var out, complaint limited
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("no answer in %v: %w", timeout, ctx.Err())
		}
		what := "xl " + strings.Join(args, " ")
		if s := clean(complaint.String()); s != "" {
			return "", fmt.Errorf("%s: %w: %s", what, err, s)
		}
		return "", fmt.Errorf("%s: %w", what, err)
	}
	return out.String(), nil
}

// limited discards output beyond a limit.
type limited struct{ bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	l.Buffer.Write(p[:min(len(p), max(0, maxLog-l.Len()))])
	return len(p), nil
}

// Running returns the domains, without their UUIDs and types.
func (x *XL) Running(ctx context.Context) ([]Running, error) {
	out, err := x.run(ctx, "list")
	if err != nil {
		return nil, err
	}
	return parseList(out)
}

// IOMMU returns whether devices can be given away, from "hvm_directio" in "xl info".
func (x *XL) IOMMU(ctx context.Context) (State, error) {
	out, err := x.run(ctx, "info")
	if err != nil {
		return Unknown, err
	}
	return parseInfo(out), nil
}

// Group returns ErrUnsupported.
func (x *XL) Group(context.Context, pci.Address) ([]pci.Address, error) {
	return nil, fmt.Errorf("device groups: %w: xl has no command for them", ErrUnsupported)
}

// Nodes returns the NUMA nodes of devices, from "xl info -n".
func (x *XL) Nodes(ctx context.Context, devices []pci.Address) (map[pci.Address]int, error) {
	out, err := x.run(ctx, "info", "-n")
	if err != nil {
		return nil, err
	}
	all, nodes := parseTopology(out), map[pci.Address]int{}
	for _, a := range devices {
		if n, ok := all[a]; ok {
			nodes[a] = n
		}
	}
	return nodes, nil
}

// Log returns the hypervisor's log.
func (x *XL) Log(ctx context.Context) (string, error) { return x.run(ctx, "dmesg") }

// ForceDetach removes a device from a domain's list although its device model does not
// have the device: "xl pci-detach -f". The domain must not have it.
func (x *XL) ForceDetach(ctx context.Context, domain uint16, f pci.Address) error {
	_, err := x.run(ctx, "pci-detach", "-f", strconv.Itoa(int(domain)), f.String())
	return err
}

// Attach attaches an assignable device to a running domain.
func (x *XL) Attach(ctx context.Context, domain uint16, f pci.Address) error {
	_, err := x.run(ctx, "pci-attach", strconv.Itoa(int(domain)), f.String())
	return err
}

// Destroy ends a domain at once.
func (x *XL) Destroy(ctx context.Context, domain uint16) error {
	_, err := x.run(ctx, "destroy", strconv.Itoa(int(domain)))
	return err
}

// Close does nothing.
func (x *XL) Close() error { return nil }

// parseList parses the table of "xl list". The name comes first and may contain spaces;
// five columns follow it.
func parseList(out string) ([]Running, error) {
	var list []Running
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if len(fields) < 6 {
			continue
		}
		fields = fields[len(fields)-5:]
		id, err := strconv.ParseUint(fields[0], 10, 16)
		state := fields[3]
		if err != nil || len(state) < 6 { // the header
			continue
		}
		// r blocked paused shutdown crashed dying
		list = append(list, Running{ID: uint16(id), Paused: state[2] == 'p', Dying: state[5] == 'd', Ran: fields[4] != "0.0"})
	}
	if len(list) == 0 {
		return nil, errors.New("xl list: not one domain in its answer")
	}
	return list, nil
}

func parseInfo(out string) State {
	for line := range strings.Lines(out) {
		name, value, ok := strings.Cut(line, ":")
		if !ok || strings.TrimSpace(name) != "virt_caps" {
			continue
		}
		for word := range strings.FieldsSeq(value) {
			if word == "hvm_directio" || word == "pv_directio" || word == "directio" {
				return On
			}
		}
		return Off
	}
	return Unknown
}

// parseTopology parses the lines of an address and a node below "device topology".
func parseTopology(out string) map[pci.Address]int {
	nodes := map[pci.Address]int{}
	inside := false
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "device topology"):
			inside = true
		case inside:
			fields := strings.Fields(line)
			if len(fields) != 2 {
				continue
			}
			a, err1 := pci.ParseAddress(fields[0])
			n, err2 := strconv.ParseUint(fields[1], 10, 16)
			if err1 == nil && err2 == nil {
				nodes[a] = int(n)
			}
		}
	}
	return nodes
}
