package xen

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/lab"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// Cards of every host of the lab.
const (
	bochs  = "0000:03:00.0" // 1234:1111
	sound  = "0000:04:00.0" // the same with a sound function
	virtio = "0000:05:00.0" // 1af4:1050, with a function level reset
	lonely = "0000:00:10.0" // on the root bus: nothing resets it
	edu    = "0000:01:00.0" // no display and no accelerator
)

// native are the drivers that functions have in dom0; all others have none.
var native = map[string]string{virtio: "virtio-pci"}

// functions are what each card consists of.
var functions = map[string][]string{bochs: {bochs}, sound: {sound, "0000:04:00.1"}, virtio: {virtio}}

// host is a host of the lab with a hostd.
type host struct {
	*lab.Host
	t *testing.T
}

const unit = "gpuctl-hostd"

// reading are the commands that change nothing.
var reading = []string{"cards", "describe", "events", "get"}

const hostConfig = `version: 1
discover: false
cluster: {host: %s, listen: "%s:7650", raftMultiplier: 5}
devices: {migrateURI: "xen+tcp://{address}/system", stash: 200MiB}
`

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// on is the host as another test sees it.
func (h *host) on(t *testing.T) *host { return &host{h.Host, t} }

// clean is a shell's: no VM, no hostd, and every card as dom0 had it. A lab
// that was used before is not as a new one is.
const clean = `
systemctl stop gpuctl-hostd 2>/dev/null; pkill -x gpuguest
pkill -f '^[^ ]*hostd mmio-server' && while pgrep -f '^[^ ]*hostd mmio-server'; do sleep 0.2; done; rm -rf /run/gpuctl/mmio
for d in $(virsh -q list --name | grep -vx Domain-0); do virsh -q destroy $d; done
for d in $(virsh -q list --all --name | grep -vx Domain-0); do virsh -q undefine $d; done
for s in /sys/bus/pci/drivers/pciback/0000:*; do
	[ -e $s ] || continue
	a=${s##*/}
	echo > /sys/bus/pci/devices/$a/driver_override
	echo $a > /sys/bus/pci/drivers/pciback/unbind
	echo $a > /sys/bus/pci/drivers/pciback/remove_slot
	echo $a > /sys/bus/pci/drivers_probe
done
rm -rf /var/lib/gpuctl /etc/gpuctl /etc/libvirt/hooks/libxl.d/*
true`

// install puts the programs on a host, its hook before libvirtd, and starts
// hostd.
func install(ctx context.Context, t *testing.T, h *lab.Host) *host {
	t.Helper()
	x := &host{h, t}
	must(t, labtest.Install(ctx, h, "gpuctl", "hostd", "gpuctl-hook", "gpuguest"))
	must(t, h.PutReader(ctx, strings.NewReader(fmt.Sprintf(hostConfig, h.Name, h.Address)), "/etc/gpuctl.yaml", 0o600))
	x.run(ctx, "("+clean+") >/dev/null 2>&1; gpuctl hook install --driver libxl && systemctl restart libvirtd")
	x.start(ctx)
	return x
}

// start starts hostd as its unit does: whoever kills it has it back at once.
func (h *host) start(ctx context.Context) {
	h.t.Helper()
	must(h.t, labtest.StartUnit(ctx, h.Host, unit, "/usr/local/bin/hostd --config /etc/gpuctl.yaml --data-dir /var/lib/gpuctl",
		"Restart=always", "RestartSec=200ms", "StartLimitIntervalSec=0", "KillMode=process"))
	h.answers(ctx)
}

func (h *host) stop(ctx context.Context) {
	h.t.Helper()
	h.run(ctx, "systemctl stop "+unit)
}

// answers waits until hostd does.
func (h *host) answers(ctx context.Context) {
	h.t.Helper()
	testkit.Until(h.t, h.Name+": hostd answers", func() error {
		out, err := h.gpuctl(ctx, "cards", "-o", "json")
		return testkit.Want(err == nil, out, err)
	})
}

// kill ends hostd as nothing else does; it comes back.
const kill = "systemctl kill -s KILL --kill-whom=main " + unit

// run is a command that must succeed.
func (h *host) run(ctx context.Context, command string) string {
	h.t.Helper()
	out, err := h.Run(ctx, command)
	if err != nil {
		h.t.Fatalf("%s: %s: %v: %s", h.Name, command, err, out)
	}
	return out
}

// said is what a failed command printed, without what wraps it.
func said(out string, err error) string {
	var failed *lab.RunError
	if errors.As(err, &failed) {
		return strings.TrimSpace(out)
	}
	if err != nil {
		return strings.TrimSpace(out) + " " + err.Error()
	}
	return strings.TrimSpace(out)
}

func line(args []string) string {
	quoted := make([]string, len(args))
	for i, a := range args {
		quoted[i] = lab.Quote(a)
	}
	return strings.Join(quoted, " ")
}

// gpuctl on the host; its output and what it says of errors.
func (h *host) gpuctl(ctx context.Context, args ...string) (string, error) {
	return h.Run(ctx, "timeout 300 gpuctl "+line(args)+" 2>&1")
}

// virsh on the host; its output and what it says of errors.
func (h *host) virsh(ctx context.Context, args ...string) (string, error) {
	return h.Run(ctx, "timeout -k 1 150 virsh -q -c xen:///system "+line(args)+" 2>&1")
}

func (h *host) mustVirsh(ctx context.Context, args ...string) string {
	h.t.Helper()
	out, err := h.virsh(ctx, args...)
	if err != nil {
		h.t.Fatalf("%s: virsh %s: %s", h.Name, strings.Join(args, " "), said(out, err))
	}
	return out
}

// must is a gpuctl that succeeds. What only reads is asked again for a while: a
// host that others keep busy may have no answer in time.
func (h *host) must(ctx context.Context, args ...string) string {
	h.t.Helper()
	out, err := h.gpuctl(ctx, args...)
	for end := time.Now().Add(5 * time.Minute); err != nil && slices.Contains(reading, args[0]) && time.Now().Before(end); {
		h.t.Logf("%s: gpuctl %s, asked again: %s", h.Name, strings.Join(args, " "), said(out, err))
		if wait.For(ctx, time.Second) != nil {
			break
		}
		out, err = h.gpuctl(ctx, args...)
	}
	if err != nil {
		h.t.Fatalf("%s: gpuctl %s: %s", h.Name, strings.Join(args, " "), said(out, err))
	}
	return out
}

// refused is a gpuctl that must fail, with these words. What the operator
// reads is logged.
func (h *host) refused(ctx context.Context, words string, args ...string) {
	h.t.Helper()
	out, err := h.gpuctl(ctx, args...)
	h.denied("gpuctl", args, words, out, err)
}

// vetoed is a virsh that must fail, with these words.
func (h *host) vetoed(ctx context.Context, words string, args ...string) {
	h.t.Helper()
	out, err := h.virsh(ctx, args...)
	h.denied("virsh", args, words, out, err)
}

func (h *host) denied(program string, args []string, words, out string, err error) {
	h.t.Helper()
	what := program + " " + strings.Join(args, " ")
	if err == nil || !strings.Contains(out, words) {
		h.t.Errorf("%s: %s: %s; want %q (%v)", h.Name, what, said(out, err), words, err)
		return
	}
	h.t.Logf("%s\n\t%s", what, strings.ReplaceAll(said(out, err), "\n", "\n\t"))
}

// card is a card as gpuctl shows it.
type card struct {
	GPU         string `json:"gpu"`
	Address     string `json:"address"`
	Phase       string `json:"phase"`
	MachineName string `json:"machine_name"`
	Claim       string `json:"claim"`
	Message     string `json:"message"`
	ResetMethod string `json:"reset_method"`
	Functions   []struct {
		Address string `json:"address"`
		Driver  string `json:"driver"`
	} `json:"functions"`
}

func (h *host) cards(ctx context.Context) map[string]card {
	h.t.Helper()
	cards, err := parseCards(h.must(ctx, "cards", "-o", "json"))
	must(h.t, err)
	return cards
}

func parseCards(text string) (map[string]card, error) {
	var all struct {
		Cards []card `json:"cards"`
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("%w: %s", err, text)
	}
	cards := map[string]card{}
	for _, c := range all.Cards {
		cards[c.Address] = c
	}
	return cards, nil
}

// steps are the times that the steps of a change took.
type steps map[string]time.Duration

// change is gpuctl attach, detach or reset, which must succeed; what each of
// its steps took.
func (h *host) change(ctx context.Context, args ...string) steps {
	h.t.Helper()
	out := h.must(ctx, append(args, "-o", "json")...)
	took := steps{}
	for l := range strings.Lines(out) {
		var u struct {
			Step   string      `json:"step"`
			TookNs json.Number `json:"took_ns"`
		}
		if err := json.Unmarshal([]byte(l), &u); err != nil {
			h.t.Fatalf("%v: %s", err, l)
		}
		if n, err := u.TookNs.Int64(); err == nil && n > 0 {
			took[u.Step] += time.Duration(n)
		}
	}
	return took
}

// String lists the steps.
func (s steps) String() string {
	var out []string
	for _, name := range []string{"claim", "take", "reset", "attach", "store", "confirm", "detach", "unstore", "return"} {
		if d, ok := s[name]; ok {
			out = append(out, fmt.Sprintf("%s %.0f ms", name, d.Seconds()*1000))
		}
	}
	return strings.Join(out, ", ")
}

// sight is a card as everybody who knows of it has it, told at one time.
type sight struct {
	card      card
	free      bool     // in the inventory
	xen       []string // functions that Xen says the VM has
	libvirt   []string // functions that libvirt says it has
	drivers   map[string]string
	undo      string // what the journal of drivers has of it
	unsettled string // why it cannot be told
}

// look asks everybody about a card, and about a VM that may have it.
func (h *host) look(ctx context.Context, machine, address string) sight {
	h.t.Helper()
	s := sight{drivers: map[string]string{}}
	var script strings.Builder
	fmt.Fprintf(&script, "timeout 60 gpuctl cards -o json 2>&1; echo @@; timeout 60 gpuctl get gpus %s/%s -o json 2>&1; echo @@; xl pci-list %[3]s 2>/dev/null; echo @@; timeout 60 virsh -q dumpxml %[3]s 2>/dev/null; echo @@; cat /var/lib/gpuctl/drivers/* 2>/dev/null; echo @@",
		h.Name, address, lab.Quote(machine))
	for _, f := range functions[address] {
		fmt.Fprintf(&script, "; basename $(readlink /sys/bus/pci/devices/%s/driver || echo -)", f)
	}
	out, err := h.Run(ctx, script.String())
	part := strings.Split(out, "@@\n")
	if err != nil || len(part) != 6 {
		s.unsettled = fmt.Sprint(out, err)
		return s
	}
	cards, err := parseCards(part[0])
	if err != nil {
		s.unsettled = err.Error()
		return s
	}
	s.card = cards[address]
	s.free = strings.Contains(part[1], `"free": true`)
	if !s.free && !strings.Contains(part[1], `"pci_address"`) {
		s.unsettled = part[1]
	}
	drivers := strings.Fields(part[5])
	for i, f := range functions[address] {
		if strings.Contains(part[2], f) {
			s.xen = append(s.xen, f)
		}
		var bus, slot, function uint
		if _, err := fmt.Sscanf(f, "0000:%x:%x.%x", &bus, &slot, &function); err != nil {
			h.t.Fatal(err)
		}
		if strings.Contains(part[3], fmt.Sprintf("bus='0x%02x' slot='0x%02x' function='0x%x'/>\n      </source>", bus, slot, function)) {
			s.libvirt = append(s.libvirt, f)
		}
		if i < len(drivers) && drivers[i] != "-" {
			s.drivers[f] = drivers[i]
		}
		if strings.Contains(part[4], f) {
			s.undo = part[4]
		}
	}
	return s
}

// against says what is not as it should be if the VM has the card, or if
// nobody has.
func (s sight) against(machine, address string, has bool) string {
	want := functions[address]
	switch {
	case s.unsettled != "":
		return s.unsettled
	case has && (s.card.Phase != "attached" || s.card.MachineName != machine || s.card.Claim == ""):
		return fmt.Sprintf("gpuctl says %+v", s.card)
	case !has && s.card.Phase != "free":
		return fmt.Sprintf("gpuctl says %+v", s.card)
	case s.free == has:
		return fmt.Sprintf("the inventory says free %v", s.free)
	case has && !slices.Equal(s.xen, want), !has && len(s.xen) > 0:
		return fmt.Sprintf("Xen says %v", s.xen)
	case !has && s.undo != "":
		return "the journal has " + s.undo
	}
	for _, f := range want {
		driver := native[f]
		if has {
			driver = "pciback"
		}
		if s.drivers[f] != driver {
			return fmt.Sprintf("%s has driver %q, not %q", f, s.drivers[f], driver)
		}
	}
	return ""
}

// free waits until a card is nobody's: in gpuctl's list, in the inventory, for
// Xen, and for its old driver.
func (h *host) free(ctx context.Context, machine, address string) {
	h.t.Helper()
	testkit.Until(h.t, h.Name+": "+address+" is free", func() error {
		said := h.look(ctx, machine, address).against(machine, address, false)
		return testkit.Want(said == "", said)
	})
}

// has waits until a VM has a card, for gpuctl, Xen and libvirt.
func (h *host) has(ctx context.Context, machine, address string) {
	h.t.Helper()
	testkit.Until(h.t, h.Name+": "+machine+" has "+address, func() error {
		s := h.look(ctx, machine, address)
		said := s.against(machine, address, true)
		if said == "" && !slices.Equal(s.libvirt, functions[address]) {
			said = fmt.Sprintf("libvirt says %v", s.libvirt)
		}
		return testkit.Want(said == "", said)
	})
}

// settled waits until everybody agrees on who has a card, whoever it is.
func (h *host) settled(ctx context.Context, machine, address string) (has bool) {
	h.t.Helper()
	testkit.Until(h.t, h.Name+": all agree on "+address, func() error {
		s := h.look(ctx, machine, address)
		has = s.card.Phase == "attached"
		said := s.against(machine, address, has)
		return testkit.Want(said == "", said)
	})
	return has
}

// define stores a guest that starts anew when it reboots.
func (h *host) define(ctx context.Context, g *labtest.Guest, change func(string) string, devices ...string) {
	h.t.Helper()
	h.put(ctx, g, change, devices...)
	h.mustVirsh(ctx, "define", "/run/gpuctl-lab/"+g.Name+".xml")
	g.Moved(h.Host)
}

// put writes a guest's XML to the host, changed.
func (h *host) put(ctx context.Context, g *labtest.Guest, change func(string) string, devices ...string) {
	h.t.Helper()
	xml, err := g.XML(devices...)
	must(h.t, err)
	must(h.t, h.PutReader(ctx, strings.NewReader(change(xml)), "/run/gpuctl-lab/"+g.Name+".xml", 0o600))
}

// reads checks a register inside the guest.
func (h *host) reads(ctx context.Context, g *labtest.Guest, id string, bar int, offset int64, want uint64) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	d, err := g.WaitDevice(ctx, id)
	must(h.t, err)
	if v, err := g.ReadRegister(ctx, d.Address, bar, offset, 2); err != nil || v != want {
		h.t.Errorf("inside %s: BAR %d of %s %s at %#x reads %#x, not %#x (%v)", g.Name, bar, id, d.Address, offset, v, want, err)
		return
	}
	h.t.Logf("inside %s: BAR %d of %s %s at %#x reads %#x", g.Name, bar, id, d.Address, offset, want)
}

// ready waits until the guest's init answers, on a machine that does much else
// besides, too.
func (h *host) ready(ctx context.Context, g *labtest.Guest) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 18*time.Minute)
	defer cancel()
	for {
		err := g.WaitReady(ctx)
		if err == nil {
			return
		}
		if ctx.Err() != nil || h.t.Failed() {
			h.t.Fatal(err)
		}
		if out, err := h.virsh(ctx, "domstate", g.Name); err != nil {
			h.t.Fatalf("guest %s is gone: %s", g.Name, said(out, err))
		}
	}
}

// What cards read inside a guest.
func (h *host) readsBochs(ctx context.Context, g *labtest.Guest) {
	h.t.Helper()
	h.reads(ctx, g, "1234:1111", 2, 0x500, 0xb0c5)
}

// readsVirtio reads the number of queues, which are two.
func (h *host) readsVirtio(ctx context.Context, g *labtest.Guest) {
	h.t.Helper()
	h.reads(ctx, g, "1af4:1050", 4, 0x12, 2)
}

// gone waits until the guest has no device of an ID any more.
func (h *host) gone(ctx context.Context, g *labtest.Guest, id string) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	must(h.t, g.WaitGone(ctx, id))
}

// rough runs a test's steps, one after the other until one fails.
type rough struct{ t *testing.T }

func (r rough) step(name string, run func()) {
	r.t.Helper()
	if r.t.Failed() {
		return
	}
	began := time.Now()
	run()
	r.t.Logf("== %s: %.1f s", name, time.Since(began).Seconds())
}
