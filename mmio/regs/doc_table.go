package regs

import (
	"fmt"
	"strings"
)

const docHead = `# Registers of a mediated GPU

Made of the table in ` + "`mmio/regs`" + ` by ` + "`make generate`" + `. What keeps VMs apart on a mediated GPU: [isolation](mmio-isolation.md).

A VM's access to BAR0 is decided by this table. What is not in it is denied. A read that is refused gets ` + "`%#x`" + `, a write that is
refused does nothing; both are counted by reason and named in an event. A register takes accesses of 4 bytes, or of 8 as two of
4, the lower one first; PRAMIN takes 1, 2, 4 and 8. Nothing in BAR0 reaches the hardware as it is.

| class | what it means |
|---|---|
| deny | refused |
| virtual | the VM has its own, which the hardware never sees |
| const | always the same for a VM; writes do nothing |
| relocate | holds or reaches an address of the VM's, which is checked and moved into its partition |
| latch | kept until a trigger uses it |
| trigger | a write does something, within the VM's own channels |
| scan | a write makes the mediator read the VM's tables, now or at the next use |

| offset | register | class | a VM may | |
|---|---|---|---|---|
`

// Markdown returns the documentation of the table.
func Markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, docHead, Refused)
	for _, r := range rows() {
		at := fmt.Sprintf("`%06x`", r.Offset)
		if r.Count > 1 {
			at = fmt.Sprintf("`%06x` to `%06x`, each `%#x`", r.Offset, r.Offset+(r.Count-1)*r.Stride, r.Stride)
		}
		may := "read"
		switch {
		case r.Class == Deny:
			may = "–"
		case r.Write:
			may = "read, write"
		}
		fmt.Fprintf(&b, "| %s | %s | %v | %s | %s |\n", at, r.Name, r.Class, may, r.Doc)
	}
	return b.String()
}
