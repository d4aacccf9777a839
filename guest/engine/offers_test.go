package engine

import (
	"os"
	"path/filepath"
	"testing"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// What could not be written has not happened: a withdrawal is there to be tried again.
func TestChangeOfOffersThatCannotBeWrittenIsNone(t *testing.T) {
	dir := t.TempDir()
	offers, err := ReadOffers(dir, 1<<20)
	if err != nil || len(offers) != 0 {
		t.Fatal(offers, err)
	}
	offers, err = offers.Change(dir, func(all Offers) { all["t"] = &gpuctlv1.OfferRequest{Token: "t", Claim: "c"} })
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, OffersName)
	if err := os.Rename(name, name+".kept"); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(name, "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	withdraw := func(all Offers) { delete(all, "t") }
	if offers, err = offers.Change(dir, withdraw); err == nil || offers["t"] == nil {
		t.Fatalf("%v, %v", offers, err)
	}
	if err := os.RemoveAll(name); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(name+".kept", name); err != nil {
		t.Fatal(err)
	}
	if kept, err := ReadOffers(dir, 1<<20); err != nil || kept["t"].GetClaim() != "c" {
		t.Errorf("%v, %v", kept, err)
	}
	if offers, err = offers.Change(dir, withdraw); err != nil || len(offers) != 0 {
		t.Errorf("%v, %v", offers, err)
	}
	if kept, err := ReadOffers(dir, 1<<20); err != nil || len(kept) != 0 {
		t.Errorf("%v, %v", kept, err)
	}
}
