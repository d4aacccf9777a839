package xen

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Access is whether the control domain's drivers may use a device, now and after the next
// boot. It is determined each time and stored nowhere.
type Access string

// Kinds of access, with the names of xapi.
const (
	AccessEnabled         Access = "enabled"
	AccessDisabled        Access = "disabled"
	AccessDisableOnReboot Access = "disable_on_reboot" // used now; hidden after the next boot
	AccessEnableOnReboot  Access = "enable_on_reboot"  // hidden now; not after the next boot
)

// Access returns whether the control domain may use a device. A device is hidden now if
// it is bound to pciback, or if the running kernel's command line hides it and it has no
// driver. The state after the next boot is read from the configuration of grub and
// modprobe. A change of it counts even before "update-grub" was run.
func (h *Host) Access(a pci.Address) (Access, error) {
	driver, err := fs.ReadLink(h.root, path.Join("sys/bus/pci/devices", a.String(), "driver"))
	if err != nil && !isNotExist(err) {
		return "", fmt.Errorf("driver of %s: %w", a, err)
	}
	now := path.Base(driver) == pcibackDriver
	if driver == "" {
		now = hiddenBy(text4k(h.root, "proc/cmdline")).has(a)
	}
	next, err := h.hiddenNext()
	if err != nil {
		return "", err
	}
	switch hide := next.has(a); {
	case now && hide:
		return AccessDisabled, nil
	case now:
		return AccessEnableOnReboot, nil
	case hide:
		return AccessDisableOnReboot, nil
	}
	return AccessEnabled, nil
}

func isNotExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }

func text4k(root fs.FS, name string) string {
	s := string(read(root, name))
	return strings.TrimSpace(s[:min(len(s), 4096)])
}

// hiddenBy parses a kernel's command line. For the kernel, dash and underscore are the
// same. If a parameter is repeated, the last one counts.
func hiddenBy(cmdline string) hidden {
	var out hidden
	for word := range strings.FieldsSeq(cmdline) {
		name, value, _ := strings.Cut(strings.Trim(word, `"`), "=")
		switch strings.ReplaceAll(name, "_", "-") {
		case "xen-pciback.hide", "pciback.hide":
			out = parseHidden(strings.Trim(value, `"`))
		}
	}
	return out
}

func (h *Host) hiddenNext() (hidden, error) {
	fromModprobe, err := h.modprobe()
	if err != nil {
		return nil, err
	}
	line, err := h.nextCmdline()
	if err != nil {
		return nil, err
	}
	return append(fromModprobe, hiddenBy(line)...), nil
}

// modprobe parses "options xen-pciback hide=…". A file in an earlier folder replaces
// one with the same name in a later folder.
func (h *Host) modprobe() (hidden, error) {
	var out hidden
	seen := map[string]bool{}
	for _, dir := range []string{"etc/modprobe.d", "run/modprobe.d", "usr/local/lib/modprobe.d", "usr/lib/modprobe.d", "lib/modprobe.d"} {
		names, err := h.filesIn(dir, ".conf")
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			if seen[name] {
				continue
			}
			seen[name] = true
			out = append(out, parseModprobe(read(h.root, path.Join(dir, name)))...)
		}
	}
	return out, nil
}

func (h *Host) filesIn(dir, suffix string) ([]string, error) {
	entries, err := fs.ReadDir(h.root, dir)
	if isNotExist(err) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("configuration of the next boot: %w", err)
	}
	var out []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), suffix) {
			out = append(out, e.Name())
		}
	}
	slices.Sort(out)
	return out, nil
}

func parseModprobe(data []byte) hidden {
	var out hidden
	for line := range strings.Lines(strings.ReplaceAll(string(data), "\\\n", " ")) {
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[0] != "options" || strings.ReplaceAll(fields[1], "_", "-") != "xen-pciback" {
			continue
		}
		for _, option := range fields[2:] {
			if value, ok := strings.CutPrefix(strings.Trim(option, `"`), "hide="); ok {
				out = append(out, parseHidden(strings.Trim(value, `"`))...)
			}
		}
	}
	return out
}

// nextCmdline returns the command line that grub will give to the control domain's
// kernel. On hosts that have only a complete grub.cfg, such as XCP-ng, it is that of the
// first entry.
func (h *Host) nextCmdline() (string, error) {
	vars := map[string]string{}
	if main := read(h.root, "etc/default/grub"); main != nil {
		assignments(string(main), vars)
		names, err := h.filesIn("etc/default/grub.d", ".cfg")
		if err != nil {
			return "", err
		}
		for _, name := range names {
			assignments(string(read(h.root, path.Join("etc/default/grub.d", name))), vars)
		}
		// As grub's script for Xen combines them.
		always, usual := vars["GRUB_CMDLINE_LINUX"], vars["GRUB_CMDLINE_LINUX_DEFAULT"]
		if s := vars["GRUB_CMDLINE_LINUX_XEN_REPLACE"]; s != "" {
			always = s
		}
		if s := vars["GRUB_CMDLINE_LINUX_XEN_REPLACE_DEFAULT"]; s != "" {
			usual = s
		}
		return always + " " + usual, nil
	}
	for _, name := range []string{"boot/grub/grub.cfg", "boot/grub2/grub.cfg", "boot/efi/EFI/xenserver/grub.cfg"} {
		if data := read(h.root, name); data != nil {
			return parseGrub(string(data)), nil
		}
	}
	return "", nil
}

// assignments parses NAME=value lines of a shell script into vars. Values may be quoted
// and refer to variables that were set before. Anything more complex is ignored.
func assignments(script string, vars map[string]string) {
	for line := range strings.Lines(strings.ReplaceAll(script, "\\\n", "")) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "export ")
		name, value, ok := strings.Cut(line, "=")
		if !ok || name == "" || strings.ContainsAny(name, " \t#$'\"") {
			continue
		}
		if more, plus := strings.CutSuffix(name, "+"); plus {
			name, value = more, vars[more]+unquote(value, vars)
		} else {
			value = unquote(value, vars)
		}
		if len(value) <= maxFile {
			vars[name] = value
		}
	}
}

// unquote parses one word of a shell.
func unquote(s string, vars map[string]string) string {
	var out strings.Builder
	var quote byte
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == quote && quote != 0:
			quote = 0
		case quote == '\'':
			out.WriteByte(c)
		case quote == 0 && (c == '"' || c == '\''):
			quote = c
		case c == '\\' && i+1 < len(s):
			i++
			out.WriteByte(s[i])
		case quote == 0 && (c == ' ' || c == '\t' || c == '#' || c == ';'):
			return out.String()
		case c == '$':
			name := variable(s[i+1:])
			out.WriteString(vars[strings.Trim(name, "{}")])
			i += len(name)
		default:
			out.WriteByte(c)
		}
		if out.Len() > maxFile {
			break
		}
	}
	return out.String()
}

// variable returns the name of the variable, with its braces if any, with which s begins.
func variable(s string) string {
	if strings.HasPrefix(s, "{") {
		return s[:strings.IndexByte(s, '}')+1]
	}
	end := strings.IndexFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_'
	})
	if end < 0 {
		return s
	}
	return s[:end]
}

// parseGrub returns the command line of the first entry that boots Xen: its first module
// after the hypervisor.
func parseGrub(cfg string) string {
	xen := false
	for line := range strings.Lines(cfg) {
		command, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch command {
		case "multiboot", "multiboot2":
			xen = true
		case "menuentry":
			xen = false
		case "module", "module2":
			if xen {
				return rest
			}
		}
	}
	return ""
}
