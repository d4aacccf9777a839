package domxml_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"libvirt.org/go/libvirtxml"
	"pgregory.net/rapid"

	"github.com/gpuctl/gpuctl/passthrough/domxml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// odd is written as nobody writes it, and must stay that way.
const odd = `<?xml version="1.0" encoding='UTF-8'?>
<!-- kept by the night shift; do not reorder -->
<domain   type="xen"  xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0' id = '7'>
	<name>db &amp; web</name>   <uuid>11111111-1111-1111-1111-111111111111</uuid>
  <memory unit='MiB'>512</memory>
  <metadata><our:thing xmlns:our="urn:our" a='>' b="it's"><![CDATA[</devices>]]></our:thing></metadata>
  <os><type machine="xenfv" arch='x86_64'>hvm</type></os>
  <features ><acpi /><xen><e820_host state='on'/></xen></features>
  <future-element with='an attribute'><nested/></future-element>
  <devices>
    <emulator>/usr/libexec/xen-qemu-system-i386</emulator>
    <!-- <hostdev mode='subsystem' type='pci'><source><address bus='0x65' slot='0'/></source></hostdev> -->
    <hostdev type="pci" managed='no'
             mode='subsystem' unknown="x">
      <source><!-- the first --><address slot="0x00" function='0' bus="101" domain='0' /></source>
      <rom bar='off'/>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x05' function='0x0'/>
    </hostdev>
    <interface type='bridge'><source bridge='br0'/></interface>
  </devices>
</domain>
<!-- the end -->
`

func at(s string) domxml.Source {
	a, err := pci.ParseAddress(s)
	if err != nil {
		panic(err)
	}
	return domxml.Source{PCI: a}
}

func parse(t *testing.T, text string) *domxml.Document {
	t.Helper()
	d, err := domxml.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// after checks that a document is text with this one piece replaced.
func after(t *testing.T, d *domxml.Document, text, old, by string) {
	t.Helper()
	if strings.Count(text, old) != 1 {
		t.Fatalf("%q is there %d times", old, strings.Count(text, old))
	}
	if want := strings.Replace(text, old, by, 1); string(d.Bytes()) != want {
		t.Errorf("got\n%s\nwant\n%s", d.Bytes(), want)
	}
}

func TestRead(t *testing.T) {
	d := parse(t, odd)
	if d.Name() != "db & web" || d.UUID() != "11111111-1111-1111-1111-111111111111" || !d.Xen() {
		t.Errorf("%q %q %v", d.Name(), d.UUID(), d.Xen())
	}
	devices := d.HostDevices()
	if len(devices) != 1 || devices[0].Source != at("65:00.0") || devices[0].Managed || devices[0].Guest == nil || *devices[0].Guest != at("00:05.0").PCI {
		t.Errorf("%+v", devices)
	}
	x, err := d.DeviceXML(at("65:00.0"))
	if err != nil || !bytes.HasPrefix(x, []byte(`<hostdev type="pci" managed='no'`+"\n")) || !bytes.HasSuffix(x, []byte("</hostdev>")) {
		t.Errorf("%s, %v", x, err)
	}
}

func TestEditsChangeNothingElse(t *testing.T) {
	const new = "<hostdev mode='subsystem' type='pci' managed='no'><source><address domain='0x0001' bus='0x0a' slot='0x1f' function='0x7'/></source></hostdev>"
	for name, test := range map[string]struct {
		edit    func(*domxml.Document) error
		old, by string
	}{
		"add": {
			func(d *domxml.Document) error { return d.Add(domxml.HostDevice{Source: at("0001:0a:1f.7")}) },
			"    </hostdev>\n    <interface", "    </hostdev>\n    " + new + "\n    <interface",
		},
		"replace": {
			func(d *domxml.Document) error { return d.Replace(at("65:00.0"), at("0001:0a:1f.7")) },
			`<address slot="0x00" function='0' bus="101" domain='0' />`, `<address slot="0x1f" function='0x7' bus="0x0a" domain='0x0001' />`,
		},
		"replace the bus only": {
			func(d *domxml.Document) error { return d.Replace(at("65:00.0"), at("66:00.0")) }, `bus="101"`, `bus="0x66"`,
		},
		"managed": {
			func(d *domxml.Document) error { return d.SetManaged(at("65:00.0"), true) }, "managed='no'\n", "managed='yes'\n",
		},
		"passthrough": {
			(*domxml.Document).EnablePassthrough, "<e820_host state='on'/>", "<e820_host state='on'/><passthrough state='on'/>",
		},
		"channel": {
			func(d *domxml.Document) error {
				return d.AddChannel(domxml.Channel{Name: "org.gpuctl.0", Path: "/run/gpuctl/a&b"})
			},
			"</interface>\n", "</interface>\n    <channel type='unix'><source mode='bind' path='/run/gpuctl/a&amp;b'/><target type='xen' name='org.gpuctl.0'/></channel>\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := parse(t, odd)
			if err := test.edit(d); err != nil {
				t.Fatal(err)
			}
			after(t, d, odd, test.old, test.by)
		})
	}
}

func TestRemove(t *testing.T) {
	d := parse(t, odd)
	if err := d.Remove(at("65:00.0")); err != nil {
		t.Fatal(err)
	}
	from, to := strings.Index(odd, "\n    <hostdev type="), strings.Index(odd, "\n    <interface")
	after(t, d, odd, odd[from:to], "")
	if len(d.HostDevices()) != 0 {
		t.Errorf("%v", d.HostDevices())
	}
	if err := d.Remove(at("65:00.0")); !errors.Is(err, domxml.ErrNotFound) || !strings.Contains(err.Error(), "0000:65:00.0") {
		t.Error(err)
	}
}

func TestAddAndRemoveIsNothing(t *testing.T) {
	for _, text := range []string{
		odd, strings.ReplaceAll(odd, "\n", "\r\n"),
		"<domain type='kvm'><name>x</name><devices><emulator>/q</emulator></devices></domain>",
		"<domain type='kvm'><name>x</name><devices></devices></domain>",
	} {
		d := parse(t, text)
		for _, s := range []domxml.Source{at("01:00.0"), {MDev: "C0FFEE00-0000-0000-0000-00000000000A"}} {
			if err := d.Add(domxml.HostDevice{Source: s, Driver: "vfio", Alias: "ua-gpu"}); err != nil {
				t.Fatal(err)
			}
		}
		if err := d.AddChannel(domxml.Channel{Name: "c", Path: "/c"}); err != nil {
			t.Fatal(err)
		}
		if err := d.Add(domxml.HostDevice{Source: at("01:00.0")}); !errors.Is(err, domxml.ErrExists) {
			t.Error(err)
		}
		if err := d.AddChannel(domxml.Channel{Name: "c", Path: "/d"}); !errors.Is(err, domxml.ErrExists) {
			t.Error(err)
		}
		if n := len(d.Channels()); n != 1 {
			t.Errorf("%d channels", n)
		}
		for _, err := range []error{
			d.Remove(at("01:00.0")), d.Remove(domxml.Source{MDev: "c0ffee00-0000-0000-0000-00000000000a"}), d.RemoveChannel("c"),
		} {
			if err != nil {
				t.Error(err)
			}
		}
		if string(d.Bytes()) != text {
			t.Errorf("got\n%s\nwant\n%s", d.Bytes(), text)
		}
	}
}

func TestPlacesForEdits(t *testing.T) {
	const device = "<hostdev mode='subsystem' type='pci' managed='yes'><source><address domain='0x0000' bus='0x01' slot='0x00' function='0x0'/></source></hostdev>"
	for _, test := range []struct{ text, want string }{
		{"<domain type='xen'><name>x</name></domain>", "<domain type='xen'><name>x</name><devices>" + device + "</devices></domain>"},
		{"<domain type='xen'><devices/></domain>", "<domain type='xen'><devices>" + device + "</devices></domain>"},
		{"<domain type='xen'><devices /></domain>", "<domain type='xen'><devices >" + device + "</devices></domain>"},
		{"<domain type='xen'/>", "<domain type='xen'><devices>" + device + "</devices></domain>"},
	} {
		d := parse(t, test.text)
		if err := d.Add(domxml.HostDevice{Source: at("01:00.0"), Managed: true}); err != nil {
			t.Fatal(err)
		}
		if string(d.Bytes()) != test.want {
			t.Errorf("got  %s\nwant %s", d.Bytes(), test.want)
		}
	}
	for _, test := range []struct{ text, want string }{
		{"<domain type='xen'></domain>", "<domain type='xen'><features><xen><passthrough state='on'/></xen></features></domain>"},
		{"<domain type='xen'><features><acpi/></features></domain>", "<domain type='xen'><features><acpi/><xen><passthrough state='on'/></xen></features></domain>"},
		{"<domain type='xen'><features><xen/></features></domain>", "<domain type='xen'><features><xen><passthrough state='on'/></xen></features></domain>"},
		{
			"<domain type='xen'><features><xen><passthrough mode='sync_pt' state=\"off\"/></xen></features></domain>",
			"<domain type='xen'><features><xen><passthrough mode='sync_pt' state=\"on\"/></xen></features></domain>",
		},
		{"<domain type='xen'><features><xen><passthrough/></xen></features></domain>", "<domain type='xen'><features><xen><passthrough state='on'/></xen></features></domain>"},
	} {
		d := parse(t, test.text)
		for range 2 {
			if err := d.EnablePassthrough(); err != nil {
				t.Fatal(err)
			}
		}
		if string(d.Bytes()) != test.want || !d.Passthrough() {
			t.Errorf("got  %s\nwant %s", d.Bytes(), test.want)
		}
	}
}

func TestRefused(t *testing.T) {
	for name, text := range map[string]string{
		"nothing": "", "text": "hello", "another root": "<network/>", "two roots": "<domain/><domain/>", "not ended": "<domain><devices></domain>",
		"ended twice": "<domain></domain></domain>", "an attribute twice": "<domain type='xen' type='kvm'/>",
		"a document type":  "<!DOCTYPE domain [<!ENTITY x 'y'>]><domain/>",
		"an entity":        "<domain><name>&x;</name></domain>",
		"another encoding": "<?xml version='1.0' encoding='UTF-16'?><domain/>",
		"too deep":         strings.Repeat("<domain>", 100) + strings.Repeat("</domain>", 100),
		"too large":        "<domain>" + strings.Repeat(" ", 5<<20) + "</domain>",
		"broken device":    "<domain><devices><hostdev mode='subsystem' type='pci'><source><address bus='x'/></source></hostdev></devices></domain>",
	} {
		if _, err := domxml.Parse([]byte(text)); !errors.Is(err, domxml.ErrSyntax) {
			t.Errorf("%s: %v", name, err)
		}
	}
	d := parse(t, odd)
	before := string(d.Bytes())
	for name, err := range map[string]error{
		"no such function": d.Add(domxml.HostDevice{Source: domxml.Source{PCI: pci.Address{Device: 0x20}}}),
		"no UUID":          d.Add(domxml.HostDevice{Source: domxml.Source{MDev: "'/><x y='"}}),
		"both":             d.Add(domxml.HostDevice{Source: domxml.Source{MDev: "c0ffee00-0000-0000-0000-00000000000a", PCI: at("01:02.3").PCI}}),
		"mixed":            d.Replace(at("65:00.0"), domxml.Source{MDev: "c0ffee00-0000-0000-0000-00000000000a"}),
		"relative path":    d.AddChannel(domxml.Channel{Name: "x", Path: "run/x"}),
		"long path":        d.AddChannel(domxml.Channel{Name: "x", Path: "/" + strings.Repeat("x", 107)}),
		"odd name":         d.AddChannel(domxml.Channel{Name: "x'y", Path: "/x"}),
	} {
		if !errors.Is(err, domxml.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if string(d.Bytes()) != before {
		t.Error("a refused edit changed something")
	}
}

const good = `<domain type='xen'><name>vm</name><memory unit='GiB'>4</memory><currentMemory unit='KiB'>4194304</currentMemory>
<os><type arch='x86_64' machine='xenfv'>hvm</type></os><features><acpi/><xen><passthrough state='on'/></xen></features><devices>
<hostdev mode='subsystem' type='pci' managed='no'><source><address domain='0' bus='1' slot='0' function='0'/></source></hostdev>
</devices></domain>`

const goodQEMU = `<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><name>vm</name><memory unit='MiB'>4096</memory>
<memtune><hard_limit unit='G'>5</hard_limit></memtune>
<os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os><features><acpi/></features><devices>
<controller type='pci' index='0' model='pcie-root'/>
<controller type='pci' index='1' model='pcie-root-port'/>
<controller type='pci' index='2' model='pcie-root-port'/>
<hostdev mode='subsystem' type='pci' managed='no'><source><address domain='0' bus='1' slot='0' function='0'/></source>
<address type='pci' domain='0' bus='1' slot='0' function='0'/></hostdev>
</devices></domain>`

func TestCheck(t *testing.T) {
	plug := domxml.Use{HotPlug: true}
	for name, test := range map[string]struct {
		base, old, by string
		use           domxml.Use
		kind          domxml.ProblemKind
		fatal         bool
		says          string
	}{
		"no passthrough flag, hot-plug": {good, "<xen><passthrough state='on'/></xen>", "", plug, domxml.NoPassthrough, true, "<features><xen><passthrough state='on'/></xen></features>"},
		"passthrough off":               {good, "<passthrough state='on'/>", "<passthrough state='off'/>", plug, domxml.NoPassthrough, true, "start it anew"},
		"no passthrough flag, at start": {good, "<xen><passthrough state='on'/></xen>", "", domxml.Use{}, domxml.NoPassthrough, false, "while it runs"},
		"PV":                            {good, "<type arch='x86_64' machine='xenfv'>hvm", "<type>linux", plug, domxml.NotHVM, true, "PV guest"},
		"PVH":                           {good, "<type arch='x86_64' machine='xenfv'>hvm", "<type>xenpvh", plug, domxml.NotHVM, true, "PVH guest"},
		"no ACPI":                       {good, "<acpi/>", "", plug, domxml.NoACPI, true, "<features><acpi/></features>"},
		"ballooned":                     {good, "4194304", "1048576", plug, domxml.PopulateOnDemand, true, "1024 MiB of its 4096 MiB"},
		"managed":                       {good, "managed='no'", "managed='yes'", plug, domxml.Managed, false, "managed='no'"},
		"mdev": {
			good, "type='pci' managed='no'><source><address domain='0' bus='1' slot='0' function='0'/>",
			"type='mdev' model='vfio-pci'><source><address uuid='c0ffee00-0000-0000-0000-00000000000a'/>", plug, domxml.MDevOnXen, true, "virtual function",
		},
		"twice": {
			good, "</devices>", "<hostdev mode='subsystem' type='pci'><source><address domain='0x0' bus='0x01' slot='0' function='0'/></source></hostdev></devices>",
			plug, domxml.Duplicate, true, "0000:01:00.0: it is there twice",
		},
		"again":          {good, "", "", domxml.Use{Add: []domxml.Source{at("01:00.0")}}, domxml.Duplicate, true, "has it already"},
		"bad address":    {good, "", "", domxml.Use{Add: []domxml.Source{{PCI: pci.Address{Function: 9}}}}, domxml.BadDevice, true, "no PCI function"},
		"out of range":   {good, "slot='0'", "slot='32'", plug, domxml.BadDevice, true, `slot="32"`},
		"as a network":   {good, "</devices>", "<interface type='hostdev'><source><address type='pci' domain='0' bus='1' slot='0' function='0'/></source></interface></devices>", plug, domxml.Elsewhere, true, "<interface type='hostdev'>"},
		"as a disk":      {good, "</devices>", "<disk type='nvme' device='disk'><source type='pci' namespace='1'><address domain='0' bus='1' slot='0' function='0'/></source><target dev='vda'/></disk></devices>", plug, domxml.Elsewhere, true, "<disk type='nvme'>"},
		"as an argument": {goodQEMU, "</devices>", "</devices><qemu:commandline><qemu:arg value='-device'/><qemu:arg value='vfio-pci,host=01:00.0,id=x'/></qemu:commandline>", domxml.Use{}, domxml.Elsewhere, true, "command line"},
		"i440fx":         {goodQEMU, "pc-q35-7.2", "pc-i440fx-7.2", plug, domxml.Machine, false, "q35"},
		"microvm":        {goodQEMU, "pc-q35-7.2", "microvm", plug, domxml.Machine, true, "no PCI"},
		"one port short": {goodQEMU, "", "", domxml.Use{Add: []domxml.Source{at("02:00.0"), at("03:00.0")}}, domxml.NoPorts, true, "1 free PCI Express ports, 2 needed; add 1 times"},
		"no port":        {goodQEMU, "index='2' model='pcie-root-port'/>", "index='2' model='pcie-root-port'><target hotplug='off'/></controller>", plug, domxml.NoPorts, true, "0 free"},
		"no ACPI, qemu":  {goodQEMU, "<acpi/>", "", plug, domxml.NoACPI, true, "ACPI"},
		"too little":     {goodQEMU, "unit='G'>5<", "unit='GiB'>4<", domxml.Use{}, domxml.MemoryLimit, true, "raise the limit to 5120 MiB"},
	} {
		t.Run(name, func(t *testing.T) {
			if test.old != "" && !strings.Contains(test.base, test.old) {
				t.Fatalf("%q is not there", test.old)
			}
			problems := parse(t, strings.Replace(test.base, test.old, test.by, 1)).Check(test.use)
			if len(problems) != 1 {
				t.Fatalf("%d problems: %+v", len(problems), problems)
			}
			p := problems[0]
			if p.Kind != test.kind || p.Fatal != test.fatal || !strings.Contains(p.Message, test.says) || !strings.HasPrefix(p.Message, "domain vm: ") {
				t.Errorf("%+v", p)
			}
		})
	}
	for name, test := range map[string]struct {
		text string
		use  domxml.Use
	}{
		"Xen": {good, plug}, "Xen, one more": {good, domxml.Use{HotPlug: true, Add: []domxml.Source{at("02:00.0")}}},
		"qemu": {goodQEMU, plug}, "qemu, one more": {goodQEMU, domxml.Use{Add: []domxml.Source{at("02:00.0")}}},
		"no devices": {"<domain type='xen'><name>x</name><os><type>linux</type></os></domain>", domxml.Use{}},
	} {
		if problems := parse(t, test.text).Check(test.use); len(problems) != 0 {
			t.Errorf("%s: %+v", name, problems)
		}
	}
}

// What libvirt's own XML types see after any edits is what this package says.
func TestEditsAgreeWithLibvirtXML(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.SampledFrom([]string{odd, good, goodQEMU, strings.ReplaceAll(odd, "\n", "\r\n")}).Draw(t, "text")
		d, err := domxml.Parse([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		source := rapid.Custom(func(t *rapid.T) domxml.Source {
			if rapid.Bool().Draw(t, "mdev") {
				return domxml.Source{MDev: rapid.SampledFrom([]string{"c0ffee00-0000-0000-0000-00000000000a", "c0ffee00-0000-0000-0000-00000000000b"}).Draw(t, "uuid")}
			}
			return domxml.Source{PCI: pci.Address{Domain: rapid.Uint32Max(1).Draw(t, "domain"), Bus: rapid.Uint8Max(2).Draw(t, "bus"), Function: rapid.Uint8Max(1).Draw(t, "function")}}
		})
		have := map[domxml.Source]bool{}
		for _, h := range d.HostDevices() {
			have[h.Source] = true
		}
		for range rapid.IntRange(1, 12).Draw(t, "edits") {
			a, b := source.Draw(t, "a"), source.Draw(t, "b")
			switch rapid.IntRange(0, 2).Draw(t, "what") {
			case 0:
				if err := d.Add(domxml.HostDevice{Source: a}); (err == nil) == have[a] {
					t.Fatalf("add %s: %v", a, err)
				}
				have[a] = true
			case 1:
				if err := d.Remove(a); (err == nil) != have[a] {
					t.Fatalf("remove %s: %v", a, err)
				}
				delete(have, a)
			case 2:
				fits := have[a] && (a == b || !have[b]) && (a.MDev == "") == (b.MDev == "")
				if err := d.Replace(a, b); (err == nil) != fits {
					t.Fatalf("replace %s by %s: %v", a, b, err)
				}
				if fits {
					delete(have, a)
					have[b] = true
				}
			}
		}
		var x libvirtxml.Domain
		if err := x.Unmarshal(string(d.Bytes())); err != nil {
			t.Fatal(err)
		}
		seen := map[domxml.Source]bool{}
		for _, h := range x.Devices.Hostdevs {
			switch {
			case h.SubsysPCI != nil:
				a := h.SubsysPCI.Source.Address
				seen[domxml.Source{PCI: pci.Address{Domain: uint32(*a.Domain), Bus: uint8(*a.Bus), Device: uint8(*a.Slot), Function: uint8(*a.Function)}}] = true
			case h.SubsysMDev != nil:
				seen[domxml.Source{MDev: h.SubsysMDev.Source.Address.UUID}] = true
			}
		}
		if len(seen) != len(have) {
			t.Fatalf("libvirt sees %v, not %v", seen, have)
		}
		for s := range have {
			if !seen[s] {
				t.Fatalf("libvirt sees no %s", s)
			}
		}
	})
}

// Any XML that is taken survives any edit: an added device is found, what was
// there before is there after, byte for byte, and adding then removing is
// nothing.
func FuzzEdit(f *testing.F) {
	for _, seed := range []string{odd, good, goodQEMU, "<domain type='xen'/>", "<domain><devices><!-- --><hostdev mode='subsystem' type='pci'><source><address bus='1' slot='0'/></source></hostdev></devices></domain>"} {
		f.Add([]byte(seed), uint8(1))
	}
	f.Fuzz(func(t *testing.T, text []byte, bus uint8) {
		d, err := domxml.Parse(text)
		if err != nil {
			return
		}
		if !bytes.Equal(d.Bytes(), text) {
			t.Fatal("reading changed it")
		}
		d.Check(domxml.Use{HotPlug: true, Add: []domxml.Source{at("02:00.0")}})
		had := d.HostDevices()
		s := domxml.Source{PCI: pci.Address{Domain: 0xffff, Bus: bus, Device: 7, Function: 1}}
		if err := d.Add(domxml.HostDevice{Source: s}); err != nil {
			if errors.Is(err, domxml.ErrExists) || len(text) > 4<<20-500 {
				return
			}
			t.Fatal(err)
		}
		added := d.Bytes()
		// What was added is one piece: the rest is a prefix and a suffix.
		if !around(text, added) {
			t.Fatalf("%q became %q", text, added)
		}
		if len(d.HostDevices()) != len(had)+1 {
			t.Fatalf("%d devices, then %d", len(had), len(d.HostDevices()))
		}
		for _, h := range had {
			if h.Source.MDev == "" {
				if err := d.Replace(h.Source, domxml.Source{PCI: pci.Address{Domain: 0xfffe, Bus: bus, Device: 3}}); err != nil && !errors.Is(err, domxml.ErrExists) {
					t.Fatal(err)
				}
				break
			}
		}
		if err := d.EnablePassthrough(); err != nil {
			t.Fatal(err)
		}
		if !d.Passthrough() {
			t.Fatal("the flag is not seen")
		}
		d, err = domxml.Parse(added)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Remove(s); err != nil {
			t.Fatal(err)
		}
		if len(d.HostDevices()) != len(had) {
			t.Fatalf("%d devices, after adding and removing %d", len(had), len(d.HostDevices()))
		}
	})
}

// around says that new is old with something put in, where one "/>" may have
// become a pair of tags.
func around(old, new []byte) bool {
	n := 0
	for n < len(old) && n < len(new) && old[n] == new[n] {
		n++
	}
	m := 0
	for m < len(old)-n && old[len(old)-1-m] == new[len(new)-1-m] {
		m++
	}
	left := string(old[n : len(old)-m])
	return left == "" || left == "/" || left == "/>"
}
