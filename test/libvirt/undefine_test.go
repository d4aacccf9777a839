package libvirt_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A definition with firmware of its own goes as any other, and the variables of the firmware stay.
func TestDefinitionWithFirmwareVariablesIsRemoved(t *testing.T) {
	r, a, _ := rig(t)
	c := client(t, a, limits())
	xml, err := r.Guest("vm8", "aaaaaaaa-0000-4000-8000-000000000008", "")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	code, vars := filepath.Join(dir, "code.fd"), filepath.Join(dir, "vars.fd")
	for _, name := range []string{code, vars} {
		if err := os.WriteFile(name, make([]byte, 1<<16), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	firmware := "<loader readonly='yes' type='pflash'>" + code + "</loader><nvram>" + vars + "</nvram><boot dev='hd'/>"
	d, err := c.Define(t.Context(), []byte(strings.Replace(string(xml), "<boot dev='hd'/>", firmware, 1)))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Undefine(t.Context(), d); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(vars); err != nil {
		t.Errorf("the variables of its firmware: %v", err)
	}
}
