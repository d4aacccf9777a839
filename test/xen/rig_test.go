package xen

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/lab"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// Cards of every host of the lab.
const (
	bochs  = "0000:03:00.0" // 1234:1111
	sound  = "0000:04:00.0" // the same with a sound function
	virtio = "0000:05:00.0" // 1af4:1050, with a function level reset
	lonely = "0000:00:10.0" // on the root bus: nothing resets it
)

// host is a host of the lab with a hostd.
type host struct {
	*lab.Host
	t *testing.T
}

const unit = "gpuctl-hostd"

const hostConfig = `version: 1
discover: false
cluster: {host: %s, listen: "%s:7650"}
`

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// install puts the programs on a host, its hook before libvirtd, and starts
// hostd.
func install(ctx context.Context, t *testing.T, h *lab.Host, address string) *host {
	t.Helper()
	x := &host{h, t}
	must(t, labtest.Install(ctx, h, "gpuctl", "hostd", "gpuctl-hook", "gpuguest"))
	must(t, h.PutReader(ctx, strings.NewReader(fmt.Sprintf(hostConfig, h.Name, address)), "/etc/gpuctl.yaml", 0o600))
	x.run(ctx, "gpuctl hook install --driver libxl && systemctl restart libvirtd")
	x.start(ctx)
	return x
}

func (h *host) start(ctx context.Context) {
	h.t.Helper()
	must(h.t, labtest.StartUnit(ctx, h.Host, unit, "/usr/local/bin/hostd --config /etc/gpuctl.yaml --data-dir /var/lib/gpuctl"))
	h.answers(ctx)
}

// answers waits until hostd does.
func (h *host) answers(ctx context.Context) {
	h.t.Helper()
	h.until(ctx, 3*time.Minute, "hostd answers", func() (bool, string) {
		out, err := h.gpuctl(ctx, "cards", "-o", "json")
		return err == nil, fmt.Sprint(out, err)
	})
}

// restart ends hostd as nothing else does, and starts it again.
func (h *host) restart(ctx context.Context) {
	h.t.Helper()
	h.run(ctx, "systemctl kill -s KILL --kill-whom=main "+unit+"; systemctl stop "+unit)
	h.start(ctx)
}

// run is a command that must succeed.
func (h *host) run(ctx context.Context, command string) string {
	h.t.Helper()
	out, err := h.Run(ctx, command)
	if err != nil {
		h.t.Fatalf("%s: %s: %v: %s", h.Name, command, err, out)
	}
	return out
}

// gpuctl on the host; its output and what it says of errors.
func (h *host) gpuctl(ctx context.Context, args ...string) (string, error) {
	for i, a := range args {
		args[i] = lab.Quote(a)
	}
	return h.Run(ctx, "timeout 300 gpuctl "+strings.Join(args, " ")+" 2>&1")
}

func (h *host) must(ctx context.Context, args ...string) string {
	h.t.Helper()
	out, err := h.gpuctl(ctx, args...)
	if err != nil {
		h.t.Fatalf("%s: gpuctl %s: %v: %s", h.Name, strings.Join(args, " "), err, out)
	}
	return out
}

// refused is a gpuctl that must fail, with these words.
func (h *host) refused(ctx context.Context, words string, args ...string) {
	h.t.Helper()
	what := strings.Join(args, " ")
	out, err := h.gpuctl(ctx, args...)
	if err != nil {
		out += err.Error()
	}
	if err == nil || !strings.Contains(out, words) {
		h.t.Errorf("%s: gpuctl %s: %v: %s; want %q", h.Name, what, err, out, words)
		return
	}
	h.t.Logf("gpuctl %s: %s", what, strings.TrimSpace(out))
}

// card is a card as gpuctl shows it.
type card struct {
	GPU         string `json:"gpu"`
	Address     string `json:"address"`
	Phase       string `json:"phase"`
	MachineName string `json:"machine_name"`
	Claim       string `json:"claim"`
	Message     string `json:"message"`
	Functions   []struct {
		Address string `json:"address"`
		Driver  string `json:"driver"`
	} `json:"functions"`
}

func (h *host) cards(ctx context.Context) map[string]card {
	h.t.Helper()
	var all struct {
		Cards []card `json:"cards"`
	}
	out := h.must(ctx, "cards", "-o", "json")
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		h.t.Fatalf("%v: %s", err, out)
	}
	cards := map[string]card{}
	for _, c := range all.Cards {
		cards[c.Address] = c
	}
	return cards
}

// free waits until a card is nobody's: in gpuctl's list, in the inventory, and
// for its old driver.
func (h *host) free(ctx context.Context, address, driver string) {
	h.t.Helper()
	h.until(ctx, 3*time.Minute, address+" is free", func() (bool, string) {
		c := h.cards(ctx)[address]
		free := c.Phase == "free"
		for _, f := range c.Functions {
			if f.Address == address && f.Driver != driver {
				free = false
			}
		}
		out := h.must(ctx, "get", "gpus", h.Name+"/"+address, "-o", "json")
		return free && strings.Contains(out, `"free": true`), fmt.Sprintf("%+v %s", c, out)
	})
}

// has waits until a VM has a card, for gpuctl and for Xen.
func (h *host) has(ctx context.Context, machine, address string) {
	h.t.Helper()
	h.until(ctx, 3*time.Minute, machine+" has "+address, func() (bool, string) {
		c := h.cards(ctx)[address]
		list, err := h.Run(ctx, "xl pci-list "+lab.Quote(machine))
		return c.Phase == "attached" && c.MachineName == machine && c.Claim != "" && err == nil && strings.Contains(list, address), fmt.Sprintf("%+v %s", c, list)
	})
}

func (h *host) until(ctx context.Context, limit time.Duration, what string, ok func() (bool, string)) {
	h.t.Helper()
	end := time.Now().Add(limit)
	for {
		done, said := ok()
		if done {
			return
		}
		if time.Now().After(end) || ctx.Err() != nil {
			h.t.Fatalf("%s: not so: %s: %s", h.Name, what, said)
		}
		time.Sleep(300 * time.Millisecond)
	}
}
