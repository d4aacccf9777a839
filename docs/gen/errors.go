package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuctl/gpuctl/internal/reason"
)

const errorsHead = `# Errors

Made of the table in ` + "`internal/reason`" + ` by ` + "`make generate`" + `.

Each error that hostd answers a call with has a code of Connect's and a detail ` + "`gpuctl.v1.ErrorReason`" + `: the reason's code, what
the error is about (` + "`object_kind`, `object`" + `), what to do next, and whether nothing was done and the same may be asked again (*retry*).
Programs decide by the reason, never by the message, which is for people and may change. A reason's code keeps its meaning; new
ones may come, and who does not know one goes by the code of Connect's, and by *retry* in the detail. Errors without a detail come from an older
hostd, from gpuguest or from the transport: they have the first reason of their code in this table.

gpuctl's exit status follows from the reason: 1 failed, 2 wrong usage, 3 refused before anything was touched, 4 nobody answers. It says what to do
next if hostd's message has not.

| reason | when | Connect's code | exit status | retry | what to do next, if the message does not say |
|---|---|---|---|---|---|
`

// writeErrors writes dir/errors.md.
func writeErrors(dir string) error {
	var b strings.Builder
	b.WriteString(errorsHead)
	for _, e := range reason.Table() {
		retry, next := "–", "–"
		if e.Retry {
			retry = "yes"
		}
		if e.Next != "" {
			next = e.Next
		}
		fmt.Fprintf(&b, "| `%s` | %s | `%v` | %d | %s | %s |\n", e.Code, e.Doc, e.Connect, e.Exit, retry, next)
	}
	return os.WriteFile(filepath.Join(dir, "errors.md"), []byte(b.String()), 0o644)
}
