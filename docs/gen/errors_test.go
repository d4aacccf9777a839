package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestListOfErrorsIsThatOfTheTable(t *testing.T) {
	dir := t.TempDir()
	if err := writeErrors(dir); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(filepath.Join(dir, "errors.md"))
	if err != nil {
		t.Fatal(err)
	}
	have, err := os.ReadFile("../errors.md")
	if err != nil || !bytes.Equal(have, want) {
		t.Errorf("docs/errors.md is not as the table of internal/reason: make generate (%v)", err)
	}
}
